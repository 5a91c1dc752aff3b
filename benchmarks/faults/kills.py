"""Training runs that are killed at random moments, resumed, and compared with the run that was not."""

import os
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

from benchmarks.faults.kinds import RECIPE
from benchmarks.faults.outcomes import same
from recurra.train.checkpoint import CheckpointError, CheckpointFolder
from recurra.train.metrics import read_metrics
from recurra.train.run import resume_run, start_run
from recurra.train.run_folder import RunFolder

TEXT = """
experiment: {experiment}
data: {{path: {corpus}, batch_size: 2, segment_length: 4, bptt_segments: 2, cache: {corpus}/cache}}
model: {{n_layer: 2, d_model: 8, d_channel_mixing: 12, dropout: 0.1, {model}}}
training: {{epochs: 4, log_every: 1, save_every: 1, tensorboard: false, accelerator: cpu, threads: 1}}
{averaged}
"""
LONGER = ["--training.epochs", "12", "--training.save_every", "1"]
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLOCK = ("seconds", "tokens_per_second")
KILLS_PER_RUN = 5

RIGHT = "the same as the run that was not interrupted"
WRONG = "another log, other weights, or something left over"
LOST = "no checkpoint where there had been one"
MESSAGE = "failed to start, resume or stop"


def tally_kills(folder: Path, n: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill runs `n` times in all, a few times each.

    Returns:
        how many runs ended how, and how many kills came where; and a line on each run that went wrong.
    """
    draw, counts, wrong = Random(f"{seed} kills"), Counter(), []
    wholes = {}
    for recipe in _recipes(folder)[: -(-n // KILLS_PER_RUN)]:
        began = time.perf_counter()
        if _end(_forked(recipe, recipe.with_suffix(""), resumed=False)):
            raise RuntimeError(f"the run of {recipe.name} that nobody interrupts did not come to its end")
        wholes[recipe] = time.perf_counter() - began, _result(recipe.with_suffix(""))
    for number in range(-(-n // KILLS_PER_RUN)):
        recipe = list(wholes)[number % len(wholes)]
        duration, expected = wholes[recipe]
        run = folder / f"{recipe.stem}-{number}"
        outcome = _killed_run(recipe, run, min(KILLS_PER_RUN, n - number * KILLS_PER_RUN), duration, draw, counts)
        if outcome is None:
            outcome = RIGHT if same(_result(run), expected) else WRONG
        counts[f"run: {outcome}"] += 1
        if outcome != RIGHT:
            wrong.append(f"{run.name}: {outcome}")
        shutil.rmtree(run)
    return counts, wrong


def _recipes(folder: Path) -> list[Path]:
    """Write one recipe for Memory Horizon, and two for a text: GateLoop with averaged weights, and CRT's segments."""
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
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)
    return [folder / f"{name}.yaml" for name in recipes]


def _killed_run(recipe: Path, run: Path, kills: int, duration: float, draw: Random, counts: Counter) -> str | None:
    """Train a run through so many kills to its end; say what went wrong, or None."""
    for _ in range(kills):
        had = _saved(run)
        child = _forked(recipe, run, resumed=had)
        place = _wait(run, child, duration, draw)
        chosen = draw.choice(SIGNALS)
        os.kill(child, chosen)
        status = _end(child)
        counts[f"{chosen.name} {place}"] += 1
        if status not in (0, chosen.value, 128 + chosen.value):
            return MESSAGE
        if had and not _saved(run):
            return LOST
    return None if _end(_forked(recipe, run, resumed=_saved(run))) == 0 else MESSAGE


def _wait(run: Path, child: int, duration: float, draw: Random) -> str:
    """Wait for a random moment, in every second case one at which a checkpoint is being written; name it."""
    if draw.random() < 0.5:
        time.sleep(draw.random() * duration)
        return "at any moment"
    time.sleep(draw.random() * duration / 2)
    until, names = time.perf_counter() + duration, []
    while time.perf_counter() < until:
        with suppress(FileNotFoundError):
            names = os.listdir(run / "checkpoints")
        if any(name.startswith(".") for name in names):
            time.sleep(draw.random() * 3e-3)
            return "while a checkpoint is written"
    return "at any moment"


def _saved(run: Path) -> bool:
    """Say whether the run has a checkpoint that can be loaded; what is there but damaged is an error."""
    try:
        CheckpointFolder(RunFolder(run).checkpoints).load("last")
    except CheckpointError:
        if CheckpointFolder(RunFolder(run).checkpoints).steps():
            raise
        return False
    return True


def _forked(recipe: Path, run: Path, *, resumed: bool) -> int:
    """Train in a process of its own, which starts at once because everything is loaded here."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        if not resumed:
            shutil.rmtree(run, ignore_errors=True)  # killed before its first checkpoint: it begins again
        longer = LONGER if recipe.stem == "horizon" else ()
        trainer = resume_run(run) if resumed else start_run(recipe, run, longer)
        received = trainer.fit().received
        status = 0 if received is None or trainer.finished else 128 + received
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)


def _end(child: int) -> int:
    """Wait for a process, and return its exit status, or the number of the signal that ended it."""
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _result(run: Path) -> tuple[list, dict, list]:
    """What must not depend on interruptions: the log, the last weights, and no file that is half written."""
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in read_metrics(run / "log.jsonl")]
    _, last = CheckpointFolder(RunFolder(run).checkpoints).load("last")
    return rows, last["model"], [path.name for path in run.rglob(".*.tmp")]
