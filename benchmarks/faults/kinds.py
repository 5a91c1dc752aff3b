"""The kinds of files that Recurra reads: how each is written and read, and what it is damaged with."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from rich.console import Console

from benchmarks.faults import binary_mutants, mutants
from benchmarks.faults.outcomes import Kind
from recurra.convert import huggingface
from recurra.convert.portable import PortableModel, load_single_file, read_weights, save_single_file, tokenizer_to_json
from recurra.data.corpus import TextCorpus
from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.streams.stream import Stream
from recurra.train.checkpoint import load_checkpoint
from recurra.train.experiment import to_plain
from recurra.train.metrics import JsonLog, read_metrics
from recurra.train.recipe import load_recipe, read_family
from recurra.train.run import read_scores, resume_run, start_run, write_scores
from recurra.train.run_folder import RunFolder
from recurra.video.layouts import VIDEO_LAYOUTS
from recurra.video.reader import VideoFile
from recurra.video.task import read_classes

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the cat sat on a mat\nthe dog saw naïve 日本 cats\n" * 3
RECIPE = """
experiment: memory-horizon
data: {n_samples: 40, sequence_length: 24, batch_size: 8, resets_per_sample: 2}
model:
  n_layer: 2
  d_model: 8
  d_channel_mixing: 16
  dropout: 0.1
  mixer_options: {d_qk: 8, d_v: 8, n_heads: 8, transition: data}
schedule: {warmup_steps: 4}
training: {epochs: 3, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""
"""A run of 12 updates, a few seconds long."""


def all_kinds() -> dict[str, Kind]:
    """Return every kind by its name in the table."""
    return {**_text_kinds(), **_data_kinds(), **_run_kinds(), **_weight_kinds()}


# --- mutants ---

_TEXT, _CSV, _JSON, _YAML, _SAFETENSORS, _DAMAGE = (
    partial(mutants.mutants, mutators)
    for mutators in (
        mutants.TEXT,
        mutants.CSV,
        mutants.JSON,
        mutants.YAML,
        binary_mutants.SAFETENSORS_MUTATORS,
        binary_mutants.DAMAGES,
    )
)


# --- text ---


def _copied(source: Path) -> Callable[[Path], Any]:
    return partial(shutil.copyfile, source)


def _write_scores(path: Path) -> None:
    scores = {"split": "test", "checkpoint": "best", "step": 7, "changes": {}, "loss": 1.5, "perplexity": 4.48}
    video = {"top_1": 0.5, "top_5": None, "confusion": [[1, 2], [3, 4]], "class_accuracies": {"a": 0.3, "b": None}}
    write_scores(RunFolder(path.parent), scores | video | {"n_targets": 90, "accuracy": None, "seconds": 0.5})


def _write_videos(path: Path) -> None:
    names = ["a", "b", "c", "d"]
    for name in names:
        (path.parent / f"{name}.mp4").touch()
    path.write_text("path,label\n" + "".join(f"{name}.mp4,{number}\n" for number, name in enumerate(names)))


def _write_log(path: Path) -> None:
    path.unlink(missing_ok=True)
    log = JsonLog(path)
    for step in range(1, 12):
        log.write({"step": step, "epoch": 1, "train_loss": 1 / step, "tokens": 5 * step, "seconds": 0.1 * step})
    log.close()


def _text_kinds() -> dict[str, Kind]:
    words, pairs = Vocabulary.from_text([TEXT]), BytePairEncoding.train([TEXT], 270)
    horizon, ptb = ROOT / "recipes/memory-horizon/data-controlled.yaml", ROOT / "recipes/ptb/transformers.yaml"
    return {
        "tokenizer.json, words": Kind("tokenizer.json", words.save, lambda p: Vocabulary.load(p).words, _JSON),
        "tokenizer.json, byte pairs": Kind(
            "tokenizer.json", pairs.save, lambda p: BytePairEncoding.load(p).fingerprint, _JSON
        ),
        "eval-test.json": Kind(
            "eval-test.json", _write_scores, lambda p: read_scores(RunFolder(p.parent)), _JSON, digest=False
        ),
        "log.jsonl": Kind("log.jsonl", _write_log, read_metrics, _TEXT, digest=False, grows=True),
        "recipe": Kind("recipe.yaml", _copied(horizon), lambda p: to_plain(load_recipe(p)), _YAML, digest=False),
        "recipe family": Kind("family.yaml", _copied(ptb), lambda p: read_family(p).variants, _YAML, digest=False),
        "classes.txt": Kind(
            "classes.txt",
            lambda p: p.write_text("walk\nrun\njump high\n"),
            lambda p: read_classes(RunFolder(p.parent)),
            _TEXT,
            digest=False,
        ),
        "list of videos": Kind(
            "train.csv", _write_videos, lambda p: VIDEO_LAYOUTS["csv"](p.parent, None), _CSV, digest=False
        ),
    }


# --- data ---


def _corpus_of(path: Path) -> TextCorpus:
    return TextCorpus.load(path.parent / "corpus", cache=path.parent / "cache")


def _write_cached(path: Path) -> None:
    """Let a corpus be cached, and copy the entry of its training tokens: its name in the cache depends on the text."""
    corpus = path.parent / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text(TEXT)
    _corpus_of(path)
    shutil.copyfile(_entry(path), path)


def _read_cached(path: Path) -> Any:
    shutil.copyfile(path, _entry(path))
    corpus = _corpus_of(path)
    return corpus.encoder.words, corpus.tokens("train").tolist()


def _entry(path: Path) -> Path:
    return next((path.parent / "cache").glob(f"train-*{path.suffix}"))


def _write_video(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for number in range(12):
            picture = np.full((32, 48, 3), 20 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _read_video(path: Path) -> Any:
    with VideoFile(path) as file:
        frames = file.decode()
    return frames.times.tolist(), frames.pictures


def _data_kinds() -> dict[str, Kind]:
    return {
        "encoded text": Kind("train.bin", _write_cached, _read_cached, _DAMAGE),
        "header of encoded text": Kind("train.json", _write_cached, _read_cached, _JSON),
        "video": Kind("video.mp4", _write_video, _read_video, _DAMAGE, digest=False),
    }


# --- a run ---


def train(folder: Path) -> None:
    """Train the small run in `folder`."""
    recipe = folder.parent / f"{folder.name}.yaml"
    recipe.write_text(RECIPE)
    start_run(recipe, folder).fit(Console(quiet=True))


def _trained(inside: str, path: Path) -> None:
    """Train a run whose file `inside` is `path`, once."""
    folder = path.parents[inside.count("/")]
    if not (folder / "config.yaml").exists():
        shutil.rmtree(folder, ignore_errors=True)
        train(folder)


def _resumed(path: Path) -> Any:
    trainer = resume_run(path.parent.parent, checkpoint=str(path))
    trainer.folder.unlock()
    return trainer.model.state_dict(), trainer.optimizer.state_dict()


def _run_kinds() -> dict[str, Kind]:
    best, last = "checkpoints/best.safetensors", "checkpoints/step-0000000012.safetensors"
    return {
        "summary.json": Kind(
            "summary/summary.json",
            partial(_trained, "summary.json"),
            lambda p: RunFolder(p.parent).read_summary(),
            _JSON,
            digest=False,
        ),
        "checkpoint, read": Kind(f"read/{best}", partial(_trained, best), load_checkpoint, _SAFETENSORS),
        "checkpoint, resumed from": Kind(f"resumed/{last}", partial(_trained, last), _resumed, _SAFETENSORS),
    }


# --- weights ---

FOLDER_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "manifest.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def _portable() -> PortableModel:
    torch.manual_seed(0)
    words = Vocabulary.from_text(["a cat and a dog\n"])
    config = LanguageModelConfig(vocab_size=len(words), n_layer=2, d_model=8, d_channel_mixing=8, mixer="min-gru")
    return PortableModel(LanguageModel(config).eval(), words, {"experiment": "text", "seed": 3}, 7)


def _content(model: PortableModel) -> Any:
    tokenizer = None if model.tokenizer is None else tokenizer_to_json(model.tokenizer)
    return model.model.state_dict(), asdict(model.model.config), tokenizer, model.experiment, model.step


def _write_stream(path: Path) -> None:
    stream = Stream(_portable().model)
    stream.feed([1, 2, 3])
    stream.save(path)


def _read_stream(path: Path) -> Any:
    stream = Stream(_portable().model)
    stream.load(path)
    return list(tensors(stream.state)), stream.logits, stream.recent, stream.position


def _write_foreign(path: Path) -> None:
    torch.save({"a": torch.arange(64.0), "b": torch.ones(64)}, path)


def _weight_kinds() -> dict[str, Kind]:
    kinds = {
        "single file": Kind(
            "model.safetensors",
            lambda p: save_single_file(_portable(), p),
            lambda p: _content(load_single_file(p)),
            _SAFETENSORS,
        ),
        "saved stream": Kind("stream", _write_stream, _read_stream, _SAFETENSORS),
        "weights of others": Kind("weights.pt", _write_foreign, read_weights, _DAMAGE, digest=False),
    }
    for name in FOLDER_FILES:
        kinds[f"folder for transformers, {name}"] = Kind(
            f"folder/{name}",
            lambda p: huggingface.save_folder(_portable(), p.parent),
            lambda p: _content(huggingface.load_folder(p.parent)),
            _SAFETENSORS if name.endswith("safetensors") else _JSON,
        )
    return kinds
