"""Programs that are killed at random moments, continued, and compared with the one that was not.

They are trainings (of Memory Horizon, texts and videos), a sweep, preparations of a corpus with one and two workers,
and the writing of generated videos.
"""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.faults.kinds import RECIPE
from benchmarks.faults.outcomes import same
from recurra._files.digests import file_sha256
from recurra.cli import main as recurra
from recurra.cli import prepare, sweep  # noqa: F401 - so that children start at once
from recurra.data import _documents
from recurra.train.checkpoint import CheckpointError, CheckpointFolder
from recurra.train.metrics import read_metrics
from recurra.train.run import resume_run, start_run
from recurra.train.run_folder import RunFolder
from recurra.video.motions import write_motions

TEXT = """
experiment: {experiment}
data: {{path: {corpus}, batch_size: 2, segment_length: 4, bptt_segments: 2, cache: {corpus}/cache}}
model: {{n_layer: 2, d_model: 8, d_channel_mixing: 12, dropout: 0.1, {model}}}
training: {{epochs: 4, log_every: 1, save_every: 1, tensorboard: false, accelerator: cpu, threads: 1}}
{averaged}
"""
VIDEO = """
experiment: motions-{model}
data: {{path: {videos}, n_videos: 20, n_motions: 2, frames_per_motion: 3, image_size: 16, n_frames: 3, batch_size: 4,
        workers: 1}}
model: {{patch_size: 8, n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}}
training: {{epochs: 4, log_every: 1, save_every: 1, tensorboard: false, accelerator: cpu, threads: 1}}
"""
LONGER = ["--training.epochs", "12", "--training.save_every", "1"]
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLOCK = ("seconds", "tokens_per_second", "frames_per_second")
KILLS_PER_RUN = 5

RIGHT = "the same as the one that was not interrupted"
WRONG = "another result, or something left over"
LOST = "less saved than before"
MESSAGE = "failed to start, continue or stop"


class Program(NamedTuple):
    """A program that writes a folder.

    go_on: begins or continues it, in a child, and returns its exit status. saved: counts what a kill must not take.
    result: what must not depend on kills. unfinished: the pattern of temporary files; {} is the folder's name.
    """

    name: str
    go_on: Callable[[Path], int]
    saved: Callable[[Path], int]
    result: Callable[[Path], Any]
    unfinished: str


def tally_kills(folder: Path, n: int, seed: int, only: Sequence[str] | None = None) -> tuple[Counter[str], list[str]]:
    """Kill programs `n` times in all, a few times each; `only` some of them, by name.

    Returns:
        how many ended how, and how many kills came where; and a line on each that went wrong.
    """
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    draw, counts, wrong = Random(f"{seed} kills"), Counter(), []
    n_folders = -(-n // KILLS_PER_RUN)
    wholes = []
    for program in [one for one in _programs(folder) if only is None or one.name in only][:n_folders]:
        began = time.perf_counter()
        if _end(_forked(program, folder / program.name)):
            raise RuntimeError(f"{program.name}, which nobody interrupts, did not come to its end")
        wholes.append((program, time.perf_counter() - began, program.result(folder / program.name)))
    for number in range(n_folders):
        program, duration, expected = wholes[number % len(wholes)]
        run = folder / f"{program.name}-{number}"
        outcome = _killed(program, run, min(KILLS_PER_RUN, n - number * KILLS_PER_RUN), duration, draw, counts)
        if outcome is None:
            is_right = same(program.result(run), expected) and not any(folder.rglob(".*.tmp"))
            outcome = RIGHT if is_right else WRONG
        counts[f"{program.name}: {outcome}"] += 1
        if outcome != RIGHT:
            wrong.append(f"{run.name}: {outcome}")
        shutil.rmtree(run)
    return counts, wrong


def _programs(folder: Path) -> list[Program]:
    """Write a recipe or a corpus for each program."""
    corpus, words = folder / "corpus", ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "off"]
    corpus.mkdir()
    for split, n_lines in (("train", 40), ("valid", 9), ("test", 7)):
        lines = (" ".join(words[(i + j) % 10] for j in range(5 + i % 4)) for i in range(n_lines))
        (corpus / f"{split}.txt").write_text("\n".join(lines) + "\n")
    averaged = "averaging: {start_step: 10, decay: 0.9}"
    gateloop = {"experiment": "text", "model": "mixer_options: {d_qk: 8, d_v: 8}", "averaged": averaged}
    crt = {"experiment": "text-crt", "model": "n_heads: 2, memory: ncgru, position: rnn-ncgru", "averaged": ""}
    recipes = {"horizon": RECIPE, "gateloop": TEXT.format(corpus=corpus, **gateloop)}
    recipes["crt"] = TEXT.format(corpus=corpus, **crt)
    recipes["video"] = VIDEO.format(model="crvit", videos=folder / "videos")
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)
    trained = {"saved": _has_checkpoint, "result": _run_result, "unfinished": "{}/checkpoints/.*.tmp"}
    trainings = [Program(name, partial(_train, folder / f"{name}.yaml"), **trained) for name in recipes]
    swept = ["sweep", str(folder / "gateloop.yaml"), "--training.seed", "0,1", "--out"]
    prepared = {"saved": _n_shards, "result": _shards, "unfinished": "{}/.*.tmp"}
    return [
        *trainings,
        Program("sweep", partial(_recurra, swept), _n_begun, _sweep_result, "{}/*/checkpoints/.*.tmp"),
        Program("prepare", partial(_recurra, ["prepare", str(corpus), "--out"]), **prepared),
        Program("workers", partial(_recurra, ["prepare", str(corpus), "--workers", "2", "--out"]), **prepared),
        Program("motions", _write_videos, Path.is_dir, _videos, ".{}.*.tmp"),
    ]


# --- what goes on in a child ---


def _train(recipe: Path, run: Path) -> int:
    """Train a run from its last checkpoint, or from the start if it was killed before the first."""
    resumed = _has_checkpoint(run)
    if not resumed:
        shutil.rmtree(run, ignore_errors=True)
    longer = LONGER if recipe.stem == "horizon" else ()
    trainer = resume_run(run) if resumed else start_run(recipe, run, longer)
    received = trainer.fit().received
    return 0 if received is None or trainer.finished else 128 + received


def _recurra(words: Sequence[str], out: Path) -> int:
    _documents._PIECE_BYTES = 60  # several shards
    return recurra([*words, str(out)])


def _write_videos(folder: Path) -> int:
    write_motions(folder, 20, n_motions=2, frames_per_motion=4, image_size=32)
    return 0


# --- what they leave ---


def _has_checkpoint(run: Path) -> bool:
    """Say whether the run has a checkpoint that can be loaded; what is there but damaged is an error."""
    try:
        CheckpointFolder(RunFolder(run).checkpoints).load("last")
    except CheckpointError:
        if CheckpointFolder(RunFolder(run).checkpoints).steps():
            raise
        return False
    return True


def _n_begun(out: Path) -> int:
    return sum(_has_checkpoint(run) for run in out.glob("*"))


def _n_shards(out: Path) -> int:
    return len(list(out.glob("*-*.json")))


def _run_result(run: Path) -> tuple[list, dict, dict, dict]:
    """The log, the last and the best weights, and the summary."""
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in read_metrics(run / "log.jsonl")]
    weights = [CheckpointFolder(RunFolder(run).checkpoints).load(which)[1]["model"] for which in ("last", "best")]
    summary = RunFolder(run).read_summary()
    return rows, *weights, {name: summary[name] for name in ("finished", "steps", "validation")}


def _sweep_result(out: Path) -> dict[str, tuple]:
    return {run.name: _run_result(run) for run in out.iterdir()}


def _shards(out: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in out.iterdir() if path.name != ".lock"}


def _videos(folder: Path) -> dict[str, str]:
    """The lists; and the names of the videos, which the encoder may round differently each time."""
    return {
        path.relative_to(folder).as_posix(): "" if path.suffix == ".mp4" else file_sha256(path)
        for path in folder.rglob("*.*")
    }


# --- killing ---


def _killed(program: Program, run: Path, kills: int, duration: float, draw: Random, counts: Counter) -> str | None:
    """Bring a program through so many kills to its end; say what went wrong, or None."""
    for _ in range(kills):
        had = program.saved(run)
        child = _forked(program, run)
        place = _wait(program, run, duration / 2, draw)  # what was done stays done: five kills are to come in time
        chosen = draw.choice(SIGNALS)
        os.kill(child, chosen)
        status = _end(child)
        counts[f"{chosen.name} {place}" if status else "after its end"] += 1
        if status not in (0, 130, chosen.value, 128 + chosen.value):  # 130: interrupted, as a command says it
            return MESSAGE
        if program.saved(run) < had:
            return LOST
    return None if _end(_forked(program, run)) == 0 else MESSAGE


def _wait(program: Program, run: Path, duration: float, draw: Random) -> str:
    """Wait for a random moment, in every second case one at which a file is being written; name it."""
    if draw.random() < 0.5:
        time.sleep(draw.random() * duration)
        return "at any moment"
    time.sleep(draw.random() * duration / 2)
    until = time.perf_counter() + duration
    while time.perf_counter() < until:
        if any(run.parent.glob(program.unfinished.format(run.name))):
            time.sleep(draw.random() * 3e-3)
            return "while a file is written"
    return "at any moment"


def _forked(program: Program, run: Path) -> int:
    """Begin or continue a program in a process of its own, which starts at once because everything is loaded here."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        status = program.go_on(run)
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)


def _end(child: int) -> int:
    """Wait for a process, and return its exit status, or the number of the signal that ended it."""
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
