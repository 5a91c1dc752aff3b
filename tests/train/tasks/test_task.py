"""A new task and a new language model, each from its class to a run."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
from torch import Tensor, nn

from recurra.cli import main
from recurra.models import LanguageModelShell, negative_log_likelihood, register_model
from recurra.models.registry import ModelConfig, Size, _models, from_data
from recurra.train import register_task
from recurra.train.run import open_run
from recurra.train.task import _tasks
from recurra.train.tasks import GeneratedConfig, GeneratedTask, Sequences


@dataclass(frozen=True, kw_only=True)
class CopyConfig(GeneratedConfig):
    min_length: int = 4
    max_length: int = 4
    eval_min_length: int = 4
    eval_max_length: int = 4

    def make(self):
        def draw(random, batch_size, length):
            tokens = random.integers(0, 3, (batch_size, length))
            return tokens, tokens

        return Sequences(draw, 3, 3, 3)


class Copy(GeneratedTask):
    data = CopyConfig


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelConfig):
    vocab_size: Size = from_data()
    d_model: int = 6


class ToyState(NamedTuple):
    total: Tensor


class Toy(LanguageModelShell):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size)

    def embed(self, tokens):
        return self.embedding(tokens)

    def body(self, x, state, **lengths):
        y = (self.initial_state(len(x)) if state is None else state).total[:, None] + x.cumsum(1)
        return y, ToyState(y[:, -1].clone())

    def losses(self, hidden, targets):
        return negative_log_likelihood(self.head(hidden), targets)

    def initial_state(self, batch):
        return ToyState(self.head.weight.new_zeros(batch, self.config.d_model))

    def require_state(self, state, batch):
        assert state.total.shape == (batch, self.config.d_model)


TRAINING = "training: {tensorboard: false, accelerator: cpu, threads: 1}"


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch, set_threads):
    monkeypatch.chdir(tmp_path)


def test_a_new_task_is_trained_and_scored(restored, tmp_path):
    restored(_tasks)
    register_task("copy")(Copy)
    (tmp_path / "copy.yaml").write_text(
        "experiment: copy\ndata: {steps_per_epoch: 3, eval_steps: 1, batch_size: 4}\nmodel: {n_layer: 1, d_model: 8}\n"
        + TRAINING
    )
    assert main(["train", "copy.yaml", "--run-dir", "run"]) == 0
    assert main(["eval", "run"]) == 0
    run = open_run("run")
    assert run.step == 3
    assert {"split", "step", "tokens_per_second"} <= run.scores["test"].keys()
    assert run.model.config.vocab_size == 3


def test_a_new_model_is_trained_on_text(restored, tmp_path):
    restored(_models)
    register_model("toy", config=ToyConfig)(Toy)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a cat sat on a mat and a dog ran off\n" * 30)
    (tmp_path / "toy.yaml").write_text(
        f"experiment: text-toy\ndata: {{path: {tmp_path}, cache: cache, batch_size: 2, segment_length: 4}}\n" + TRAINING
    )
    assert main(["train", "toy.yaml", "--run-dir", "toy", "--model.d_model=5", "--training.max_steps=2"]) == 0
    run = open_run("toy")
    assert (type(run.model), run.model.config.d_model, run.step) == (Toy, 5, 2)
