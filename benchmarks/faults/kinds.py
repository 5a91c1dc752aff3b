"""The kinds of files that Recurra reads, weights apart: how each is written and read, and what it is damaged with."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from rich.console import Console

from benchmarks.faults.binary_mutants import DAMAGES, SAFETENSORS
from benchmarks.faults.mutants import CSV, JSON, TEXT, YAML
from benchmarks.faults.outcomes import Kind
from benchmarks.faults.sessions import session_kinds
from benchmarks.faults.weights import weight_kinds
from recurra.data._prepare import Preparation, prepare
from recurra.data.corpus import ShardCorpus, TextCorpus
from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.train.checkpoint import load_checkpoint
from recurra.train.experiment import to_plain
from recurra.train.metrics import JsonLog, read_metrics
from recurra.train.recipe import load_recipe, read_family
from recurra.train.run import open_run, read_scores, resume_run, start_run, write_scores
from recurra.train.run_folder import RunFolder
from recurra.video.layouts import VIDEO_LAYOUTS
from recurra.video.reader import VideoFile
from recurra.video.task import read_classes

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = "the cat sat on a mat\nthe dog saw naïve 日本 cats\n" * 3
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
TEXT_RECIPE = """
experiment: text
data: {{path: {corpus}, cache: {cache}, batch_size: 2, segment_length: 8}}
model: {{n_layer: 1, d_model: 8, d_channel_mixing: 16, mixer_options: {{d_qk: 8, d_v: 8, n_heads: 8}}}}
schedule: {{warmup_steps: 2}}
training: {{epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}}
"""
"""A run over text, of a few updates."""


def all_kinds() -> dict[str, Kind]:
    """Return every kind by its name in the table."""
    return {**_text_kinds(), **_data_kinds(), **_run_kinds(), **weight_kinds(), **session_kinds()}


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
    words, pairs = Vocabulary.from_text([SENTENCES]), BytePairEncoding.train([SENTENCES], 270)
    horizon, ptb = ROOT / "recipes/memory-horizon/data-controlled.yaml", ROOT / "recipes/ptb/transformers.yaml"
    return {
        "tokenizer.json, words": Kind("tokenizer.json", words.save, lambda p: Vocabulary.load(p).words, JSON),
        "tokenizer.json, byte pairs": Kind(
            "tokenizer.json", pairs.save, lambda p: BytePairEncoding.load(p).fingerprint, JSON
        ),
        "eval-test.json": Kind(
            "eval-test.json", _write_scores, lambda p: read_scores(RunFolder(p.parent)), JSON, digest=False
        ),
        "log.jsonl": Kind("log.jsonl", _write_log, read_metrics, TEXT, digest=False, grows=True),
        "recipe": Kind("recipe.yaml", _copied(horizon), lambda p: to_plain(load_recipe(p)), YAML, digest=False),
        "recipe family": Kind("family.yaml", _copied(ptb), lambda p: read_family(p).variants, YAML, digest=False),
        "classes.txt": Kind(
            "classes.txt",
            lambda p: p.write_text("walk\nrun\njump high\n"),
            lambda p: read_classes(RunFolder(p.parent)),
            TEXT,
            digest=False,
        ),
        "list of videos": Kind(
            "train.csv", _write_videos, lambda p: VIDEO_LAYOUTS["csv"](p.parent, None), CSV, digest=False
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
        (corpus / f"{split}.txt").write_text(SENTENCES)
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


def _write_shards(path: Path) -> None:
    corpus = path.parent.parent / "corpus"
    corpus.mkdir()
    (corpus / "train.txt").write_text(SENTENCES)
    prepare(Preparation("folder", str(corpus), path.parent))


def read_shards(path: Path) -> Any:
    """Read all that prepared shards hold, of which `path` is a file."""
    corpus = ShardCorpus(path.parent)
    tokens = corpus.tokens("train")
    return corpus.encoder.fingerprint, tokens[:].tolist(), tokens.document_starts(0, len(tokens)).tolist()


def _data_kinds() -> dict[str, Kind]:
    shards = {
        f"prepared shards, {name}": Kind(f"shards/{name}", _write_shards, read_shards, kind)
        for name, kind in (
            ("manifest.json", JSON),
            ("tokenizer.json", JSON),
            ("train-00000.npy", DAMAGES),
            ("train-00000.documents.npy", DAMAGES),
        )
    }
    return {
        **shards,
        "encoded text": Kind("train.bin", _write_cached, _read_cached, DAMAGES),
        "header of encoded text": Kind("train.json", _write_cached, _read_cached, JSON),
        "video": Kind("video.mp4", _write_video, _read_video, DAMAGES, digest=False),
    }


# --- a run ---


def train(folder: Path, recipe: str = RECIPE) -> None:
    """Train a small run in `folder`."""
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(recipe)
    start_run(path, folder).fit(Console(quiet=True))


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


def _train_adapters(path: Path) -> None:
    """Train adapters on the weights of a run over text."""
    folder, corpus, base = path.parents[1], path.parents[2] / "corpus", path.parents[2] / "base"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text(SENTENCES)
    recipe = TEXT_RECIPE.format(corpus=corpus, cache=corpus.parent / "cache")
    train(base, recipe)
    train(folder, recipe + f"init_from: {base}\nlora: {{rank: 2}}\n")


def _merged(path: Path) -> Any:
    return open_run(path.parents[1]).model.state_dict()


def _run_kinds() -> dict[str, Kind]:
    best, last = "checkpoints/best.safetensors", "checkpoints/step-0000000012.safetensors"
    return {
        "summary.json": Kind(
            "summary/summary.json",
            partial(_trained, "summary.json"),
            lambda p: RunFolder(p.parent).read_summary(),
            JSON,
            digest=False,
        ),
        "checkpoint, read": Kind(f"read/{best}", partial(_trained, best), load_checkpoint, SAFETENSORS),
        "checkpoint of adapters": Kind(f"adapters/{best}", _train_adapters, _merged, SAFETENSORS),
        "checkpoint, resumed from": Kind(f"resumed/{last}", partial(_trained, last), _resumed, SAFETENSORS),
    }
