"""Damaged text files: each is refused in one sentence that names it, or read as what was written."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.faults.mutants import KINDS, mutants
from tests.summaries import make_summary

from recurra.data import BytePairEncoding, Vocabulary
from recurra.data.video import VIDEO_LAYOUTS
from recurra.files.stamped_json import read_stamped, write_stamped
from recurra.runs.own_data import read_classes
from recurra.runs.score_files import read_scores, write_scores
from recurra.runs.summary import read_summary, write_summary
from recurra.training import RunFolder, load_recipe, read_metrics
from recurra.training.csv_log import CsvLog
from recurra.training.experiment import to_plain
from recurra.training.recipe_family import read_family

N_MUTANTS = 60
RECIPES = Path(__file__).parents[2] / "recipes"
TEXT = "the cat sat on a mat\nthe dog saw naïve 日本 cats\n" * 3


def write_log(path):
    log = CsvLog(path)
    for step in range(1, 12):
        log.write({"step": step, "epoch": 1, "train_loss": 1 / step, "tokens": 5 * step, "seconds": 0.1 * step})
    log.close()


def write_scores_of(path):
    scores = {"split": "test", "checkpoint": "best", "step": 7, "changes": {}, "loss": 1.5, "perplexity": 4.48}
    video = {"top_1": 0.5, "top_5": None, "confusion": [[1, 2], [3, 4]], "class_accuracies": {"a": 0.3, "b": None}}
    write_scores(RunFolder(path.parent), scores | video | {"n_targets": 90, "accuracy": None, "seconds": 0.5})


def write_run_summary(path):
    validation = {"best": {"step": 3, "loss": 0.5}}
    numbers = {"finished": True, "steps": 3, "epochs": 0.5, "parameters": 10, "tokens": 9, "seconds": 1.5}
    rest = {"resumed_at": [1], "versions": {"torch": "2"}, "hardware": {"cores": 2, "gpu": None}}
    RunFolder(path.parent).write_summary(numbers | {"validation": validation} | rest)


def write_page_summary(path):
    write_summary(path.parent, make_summary.__wrapped__()(path.stem))


def write_videos(path):
    names = ["a", "b", "c", "d"]
    for name in names:
        (path.parent / f"{name}.mp4").touch()
    path.write_text("path,label\n" + "".join(f"{name}.mp4,{number}\n" for number, name in enumerate(names)))


@dataclass
class Kind:
    """A kind of file: how it is written and read, and which of the mutators it is damaged with."""

    file: str
    mutators: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


WITH_DIGEST = {
    "words": Kind("tokenizer.json", "json", Vocabulary.from_text([TEXT]).save, lambda p: Vocabulary.load(p).words),
    "byte pairs": Kind(
        "tokenizer.json",
        "json",
        BytePairEncoding.train([TEXT], 270).save,
        lambda p: BytePairEncoding.load(p).fingerprint,
    ),
    "summary.json": Kind("summary.json", "json", write_run_summary, lambda p: RunFolder(p.parent).read_summary()),
    "eval-test.json": Kind("eval-test.json", "json", write_scores_of, lambda p: read_scores(RunFolder(p.parent))),
    "summary of the page": Kind("a-run.json", "json", write_page_summary, read_summary),
    "recurra.json": Kind("recurra.json", "json", lambda p: write_stamped(p, {"format": 1, "step": 3}), read_stamped),
}
WITHOUT_DIGEST = {
    "recipe": Kind(
        "recipe.yaml",
        "yaml",
        lambda p: p.write_bytes((RECIPES / "memory-horizon/data-controlled.yaml").read_bytes()),
        lambda p: to_plain(load_recipe(p)),
    ),
    "family": Kind(
        "family.yaml",
        "yaml",
        lambda p: p.write_bytes((RECIPES / "ptb/transformers.yaml").read_bytes()),
        lambda p: read_family(p).variants,
    ),
    "classes": Kind(
        "classes.txt",
        "text",
        lambda p: p.write_text("walk\nrun\njump high\n"),
        lambda p: read_classes(RunFolder(p.parent)),
    ),
    "list of videos": Kind("train.csv", "csv", write_videos, lambda p: VIDEO_LAYOUTS["csv"](p.parent, None)),
}
OLDER = ("words", "byte pairs", "summary.json", "eval-test.json", "summary of the page")


def read_or_refused(kind, path):
    """What was read, or None for one sentence that names the file."""
    try:
        return kind.read(path)
    except (ValueError, OSError) as error:
        message, missing = str(error), isinstance(error, FileNotFoundError)
    assert "\n" not in message
    assert str(path.parent if missing else path) in message
    assert len(message) < 1500
    return None


def damaged(kind, path, seed=0):
    kind.write(path)
    sound = path.read_bytes()
    for mutant in mutants(sound, kind.mutators, N_MUTANTS, seed):
        path.write_bytes(mutant.data)
        yield mutant


@pytest.mark.parametrize("name", WITH_DIGEST)
def test_what_has_a_digest_is_refused_or_read_as_it_was(tmp_path, name):
    kind = WITH_DIGEST[name]
    path = tmp_path / kind.file
    kind.write(path)
    sound = kind.read(path)
    refused = 0
    for mutant in damaged(kind, path):
        found = read_or_refused(kind, path)
        assert found is None or found == sound, mutant.name
        refused += found is None
    assert refused > N_MUTANTS // 2


def test_a_log_is_refused_or_read_up_to_where_it_ends(tmp_path):
    kind = Kind("metrics.csv", "csv", write_log, read_metrics)
    path = tmp_path / kind.file
    kind.write(path)
    sound = kind.read(path)
    for mutant in damaged(kind, path):
        found = read_or_refused(kind, path)
        assert found is None or found == sound[: len(found)], mutant.name


@pytest.mark.parametrize("name", WITHOUT_DIGEST)
def test_what_is_written_by_hand_is_refused_or_read(tmp_path, name):
    kind = WITHOUT_DIGEST[name]
    outcomes = [read_or_refused(kind, tmp_path / kind.file) is None for _ in damaged(kind, tmp_path / kind.file)]
    assert sum(outcomes) > N_MUTANTS // 4


@pytest.mark.parametrize("name", OLDER)
def test_older_files_without_a_digest_are_refused_or_read(tmp_path, name):
    kind = WITH_DIGEST[name]

    def write(path):
        kind.write(path)
        content = json.loads(path.read_text())
        content.pop("sha256", None)
        content.get("model", {}).pop("sha256", None)
        path.write_text(json.dumps(content, indent=1))

    path = tmp_path / kind.file
    older = Kind(kind.file, kind.mutators, write, kind.read)
    for _ in damaged(older, path, seed=1):
        read_or_refused(older, path)


def test_mutants_follow_from_the_seed():
    data = b'{"a": [1, 2.5, "x"], "b": {"c": null}}\n' * 1
    for kind in set(KINDS) - {"yaml"}:
        first, again = ([*mutants(data, kind, 30, seed)] for seed in (5, 5))
        assert first == again
        assert first != [*mutants(data, kind, 30, 6)]
        assert all(mutant.data != data for mutant in first)
