"""A small trained run on Memory Horizon, and what tests of commands share."""

from pathlib import Path
from typing import Any

import pytest
from tests.small_figures import dots_per_inch, small_figures, unrendered_figures  # noqa: F401

from recurra.cli import main
from recurra.train.metrics import read_metrics

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


@pytest.fixture(autouse=True)
def _threads(set_threads):
    """Runs set the number of threads."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> str:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run")]) == 0
    return str(folder / "run")


def measured(run: Path) -> list[dict[str, Any]]:
    """Read a run's log, without what depends on the clock."""
    rows = read_metrics(run / "log.jsonl")
    return [{name: row[name] for name in row if name not in ("seconds", "tokens_per_second")} for row in rows]


def failure(capsys, *words: str) -> str:
    """Run a command that fails, and return the one message that it prints."""
    capsys.readouterr()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith(f"recurra {words[0]}: ")
    return captured.err


TEXT = "a cat and a dog\nthe dog saw a cat\nthe naïve cat ran — away 日本\n"


def train_on_text(folder: Path, name: str, experiment: str, vocabulary: str, model: str, epochs: int = 1) -> str:
    """Train a model on a small corpus in `folder`; return the folder of the run."""
    write_corpus(folder / "corpus", TEXT * 4)
    data = f"{{path: {folder / 'corpus'}, batch_size: 2, segment_length: 4, {vocabulary}}}"
    training = f"{{epochs: {epochs}, tensorboard: false, accelerator: cpu, threads: 1}}"
    recipe = folder / f"{name}.yaml"
    recipe.write_text(f"experiment: {experiment}\ndata: {data}\nmodel: {model}\ntraining: {training}\n")
    assert main(["train", str(recipe), "--run-dir", str(folder / name)]) == 0
    return str(folder / name)


def write_corpus(folder: Path, train: str, valid: str | None = None, test: str | None = None) -> None:
    """Write the texts of three splits, all the same unless they are given."""
    folder.mkdir(exist_ok=True)
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{split}.txt").write_text(train if text is None else text, encoding="utf-8")


TEXT_RECIPE = """
experiment: text
data: {path: CORPUS, cache: CORPUS, batch_size: 2, segment_length: 4}
model: {n_layer: 1, d_model: 8, d_channel_mixing: 0, mixer: min-gru}
training: {max_steps: 2, epochs: 9, tensorboard: false, accelerator: cpu, threads: 1}
"""


@pytest.fixture
def text_recipe(tmp_path):
    """A tiny language model on a tiny corpus."""
    write_corpus(tmp_path, "a b c a b d\n" * 5)
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT_RECIPE.replace("CORPUS", str(tmp_path)))
    return path
