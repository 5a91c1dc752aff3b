"""Disks that fail or fill up while something is written: afterwards the old stands or the new.

Every call to the system fails once, finds the disk full, and is the last one before a kill (`disk.FaultyDisk`). Then
the same is written to a real disk in memory with ever more room, as some libraries write without Python.
"""

import gc
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch

from benchmarks.faults.disk import Fault, FaultyDisk, Killed, SmallDisk
from benchmarks.faults.kinds import SENTENCES, TEXT_RECIPE, read_shards, train
from benchmarks.faults.outcomes import same
from benchmarks.faults.weights import content_of, small_mamba, small_model
from recurra import convert
from recurra.cli import _parsers
from recurra.cli.sweep import sweep
from recurra.convert import huggingface
from recurra.convert.export import onnx_file
from recurra.convert.export.onnx_file import OnnxModel, to_onnx
from recurra.convert.portable import PortableModel, load_single_file, save_single_file
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.data._prepare import Preparation, prepare
from recurra.data.corpus import TextCorpus
from recurra.streams.stream import Stream
from recurra.train import formats
from recurra.train.checkpoint import CheckpointFolder, load_checkpoint
from recurra.train.run import open_run, resume_run, start_run
from recurra.train.run_folder import RunFolder
from recurra.video.motions import write_motions

STANDS, REFUSED = "the old or the new stands", "what is there is refused"
LOST, UNSAID, LITTER, ODD, STUCK = (
    "something else is read",
    "the error is not one sentence that names the place",
    "a temporary file is left",
    "an error that is none of the disk's",
    "a repetition does not mend it",
)
_SMALL_DISK_BYTES, _PAGE = 8 * 2**20, 4096


class Writer(NamedTuple):
    """What writes something to a path, in one version or another.

    write: writes version 0 or 1 to a path. read: returns what is there, or raises OSError or ValueError. every: every
    n-th call to the system fails. n_sizes: small disks of this many sizes are tried.
    """

    write: Callable[[Path, int], Any]
    read: Callable[[Path], Any]
    every: int = 1
    n_sizes: int = 12


def tally_disk_faults(writer: Writer, folder: Path) -> tuple[Counter[str], list[str]]:
    """Let the disk below `folder` fail in all ways while version 1 is written over version 0.

    Returns:
        how often what came of it, by fault; and a line on each time that it went wrong.
    """
    trial = _Trial(writer, folder)
    with FaultyDisk(trial.disk) as counted:
        writer.write(trial.place, 1)
    for fault in get_args(Fault):
        for number in range(0, len(counted.calls), writer.every):
            trial.restore()
            faulty = FaultyDisk(trial.disk, number, fault)
            trial.count(fault, faulty, f"call {number}, {counted.calls[number]}")
    trial.restore()
    try:
        small = SmallDisk(trial.disk, _SMALL_DISK_BYTES)
        with small:
            trial.restore()
            before = shutil.disk_usage(trial.disk).free
            writer.write(trial.place, 1)
            needed = max(_PAGE, before - shutil.disk_usage(trial.disk).free, _size(trial.place))
            for n_bytes in {needed * part // writer.n_sizes // _PAGE * _PAGE for part in range(writer.n_sizes + 1)}:
                trial.restore()
                trial.count("small", small.leaving(n_bytes), f"{n_bytes} bytes left")
    except PermissionError as error:
        trial.counts[f"small: not tried ({error.strerror})"] += 1
    return trial.counts, trial.wrong


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


class _Trial:
    """One writer, and what came of its faults."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.disk, self._sound = folder / "disk", folder / "sound"
        self.place = self.disk / "here"
        self._writer = writer
        self.disk.mkdir(parents=True)
        writer.write(self.place, 1)
        self._new = writer.read(self.place)
        self._empty()
        writer.write(self.place, 0)
        shutil.copytree(self.disk, self._sound)
        self._old = self._read()[0]

    def _empty(self) -> None:
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def restore(self) -> None:
        """Put back what version 0 was."""
        self._empty()
        shutil.copytree(self._sound, self.disk, dirs_exist_ok=True)

    def count(self, fault: str, disk: AbstractContextManager[Any], when: str) -> None:
        """Write version 1 on a disk that fails."""
        # a folder that cannot be read cannot be removed either
        outcome, said = self._outcome(disk, may_litter=fault == "killed" or (fault == "once" and "read" in when))
        self.counts[f"{fault}: {outcome}"] += 1
        # a fault between two renames of a folder's files may leave it without its config, which is then missed
        may_refuse = fault in ("once", "killed") or when.endswith(("rename", "unlink"))
        if outcome != STANDS and not (outcome == REFUSED and may_refuse):
            self.wrong.append(f"{fault} at {when}: {outcome} {said}")

    def _outcome(self, disk: AbstractContextManager[Any], *, may_litter: bool) -> tuple[str, str]:
        said = None
        try:
            with disk:
                self._writer.write(self.place, 1)
        except Killed:
            said = str(self.disk)
            gc.collect()  # with the process, its locks would be gone
        except (OSError, ValueError) as error:
            said = str(error)
        except BaseException as error:
            return ODD, repr(error)
        if said is not None and ("\n" in said or str(self.disk) not in said):
            return UNSAID, said
        if not may_litter and (left := [path.name for path in self.disk.rglob("*") if path.name.endswith(".tmp")]):
            return LITTER, ", ".join(left)
        found, refused = self._read()
        self._writer.write(self.place, 1)
        if not same(self._read()[0], self._new):
            return STUCK, ""
        if same(found, self._new) or (said is not None and same(found, self._old)):
            return STANDS, ""
        return (REFUSED, refused) if refused else (LOST, "")

    def _read(self) -> tuple[Any, str]:
        try:
            return self._writer.read(self.place), ""
        except (OSError, ValueError) as error:
            return None, str(error)


# --- what is written ---


def writers() -> dict[str, Callable[[Path], Writer]]:
    """Return what makes each writer, by its name in the table; it may put what the writer needs into a folder."""
    return {
        "checkpoint": _checkpoint,
        "text cache": _text_cache,
        "prepared shards": _prepared,
        "sweep": _sweep,
        "video run, first files": _video_run,
        "generated videos": lambda _: Writer(_write_motions, _names_in),
        "stream": lambda _: Writer(_save_stream, _load_stream),
        "single file": lambda _: _exporting(save_single_file, load_single_file),
        "folder for transformers": lambda _: _exporting(huggingface.save_folder, huggingface.load_folder)._replace(
            every=7, n_sizes=4
        ),
        "published folder": lambda _: _exporting(to_huggingface, from_huggingface, small_mamba),
        "GGUF": lambda _: _exporting(convert.to_gguf, from_huggingface, small_mamba),
        "ONNX export": _onnx,
        "web export": _web,
    }


def _corpus(work: Path) -> Path:
    corpus = work / "corpus"
    corpus.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text(SENTENCES)
    return corpus


def _text_run(work: Path) -> Path:
    """Write the recipe of a small run over text."""
    recipe = work / "text.yaml"
    recipe.write_text(TEXT_RECIPE.format(corpus=_corpus(work), cache=work / "cache"))
    return recipe


def _checkpoint(work: Path) -> Writer:
    run = RunFolder(work / "run")
    run.path.parent.mkdir(parents=True)
    train(run.path)
    _, saved = CheckpointFolder(run.checkpoints).load("last")

    def save(place: Path, version: int) -> None:
        step = 12 + version
        CheckpointFolder(place).save(step, {**saved, "position": {**saved["position"], "step": step}})

    return Writer(save, lambda place: load_checkpoint(CheckpointFolder(place).steps()[-1])["position"]["step"])


def _text_cache(work: Path) -> Writer:
    corpus = _corpus(work)

    def read(place: Path) -> Any:
        found = TextCorpus.load(corpus, cache=place)
        return found.encoder.words, {split: found.tokens(split).tolist() for split in found.splits}

    return Writer(lambda place, version: version and read(place), read)


def _prepared(work: Path) -> Writer:
    asked = Preparation("folder", str(_corpus(work)), work)

    def write(place: Path, version: int) -> None:
        if version:
            prepare(replace(asked, out=place))

    return Writer(write, lambda place: read_shards(place / "manifest.json"))


def _sweep(work: Path) -> Writer:
    work.mkdir(parents=True, exist_ok=True)
    words = [str(_text_run(work)), "--training.seed", "0,1", "--out"]

    def write(place: Path, version: int) -> None:
        if version:
            sweep(_parsers.sweep([*words, str(place)]))

    def read(place: Path) -> Any:
        runs = [CheckpointFolder(RunFolder(place / f"seed={seed}").checkpoints) for seed in (0, 1)]
        return [run.load("best")[1]["model"] for run in runs]

    return Writer(write, read, every=80, n_sizes=4)


def _video_run(work: Path) -> Writer:
    work.mkdir(parents=True, exist_ok=True)
    recipe = work / "video.yaml"
    recipe.write_text(_VIDEO_RECIPE.format(videos=work / "videos"))

    def write(place: Path, version: int) -> None:
        if version:
            exists = RunFolder(place).config.exists()
            (resume_run(place) if exists else start_run(recipe, place)).folder.unlock()

    def read(place: Path) -> Any:
        run = open_run(place)
        return run.class_names, run.experiment

    return Writer(write, read)


_VIDEO_RECIPE = """
experiment: motions-timesformer
data: {{path: {videos}, n_videos: 20, n_motions: 2, frames_per_motion: 3, image_size: 16, n_frames: 3, batch_size: 8,
       workers: 0}}
model: {{patch_size: 8, n_layer: 1, d_model: 16, n_heads: 2, d_channel_mixing: 16}}
training: {{epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}}
"""


def _write_motions(place: Path, version: int) -> None:
    if version:
        write_motions(place, 3, n_motions=2, frames_per_motion=2, image_size=16)


def _names_in(place: Path) -> Any:
    return sorted((path.name, path.stat().st_size) for path in place.rglob("*") if path.is_file()) or None


def _exporting(write: Callable, read: Callable, make: Callable[[], PortableModel] = small_model) -> Writer:
    """What writes a model, whose weights tell its version."""

    def write_version(place: Path, version: int) -> None:
        model = make()
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter.add_(version)
        write(model, place)

    return Writer(write_version, lambda place: content_of(read(place)))


def _save_stream(place: Path, version: int) -> None:
    stream = Stream(small_model().model)
    stream.feed([1, 2, version])
    stream.save(place)


def _load_stream(place: Path) -> Any:
    stream = Stream(small_model().model)
    stream.load(place)
    return stream.recent, stream.logits


@cache
def _graph() -> bytes:
    return to_onnx(small_model().model).SerializeToString()


def _onnx(work: Path) -> Writer:
    work.mkdir(parents=True, exist_ok=True)
    train(work / "run", _text_run(work).read_text())
    run = open_run(work / "run")

    def write(place: Path, version: int) -> None:
        graph = onnx_file.onnx.load_from_string(_graph())
        graph.metadata_props.add(key="version", value=str(version))
        with (
            mock.patch.object(onnx_file, "to_onnx", return_value=graph),
            mock.patch.object(onnx_file, "largest_difference", return_value=0.0),
        ):
            formats.export_onnx(run, place.with_suffix(".onnx"), force=True)

    return Writer(write, lambda place: OnnxModel(place.with_suffix(".onnx"), threads=1).metadata)


def _web(work: Path) -> Writer:
    work.mkdir(parents=True, exist_ok=True)
    train(work / "run", _text_run(work).read_text())
    run = open_run(work / "run")

    def write(place: Path, version: int) -> None:
        content = bytes([version]) * 9000
        described = {"file": "model.onnx", "sha256": hashlib.sha256(content).hexdigest()}
        with (
            mock.patch.object(formats, "_exported", return_value=(described, {"model.onnx": content}, 0.0)),
            mock.patch.object(formats, "page_file", lambda name: name.encode()),
        ):
            formats.export_web([run], place, force=True)

    def read(place: Path) -> Any:
        """As the page does."""
        (described,) = json.loads((place / "engine.json").read_text())["models"]
        content = (place / described["file"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != described["sha256"]:
            raise ValueError(f"{place} is damaged")
        return content

    return Writer(write, read)
