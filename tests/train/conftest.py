"""A model and a data set that train in a blink and have all that the loop must deal with.

That is: a carried state, dropout, tied weights, transition parameters.
"""

import io
import os
import resource
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from recurra.checks import require_layout
from recurra.data._text_batches import StreamSource
from recurra.data.batches import Batch
from recurra.models.registry import DataSizes
from recurra.models.shell import negative_log_likelihood
from recurra.train.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from recurra.train.evaluate import EvaluationResult, evaluate
from recurra.train.experiment import Experiment
from recurra.train.loop import Trainer
from recurra.train.run_folder import RunFolder
from recurra.train.task import Task

VOCABULARY = 7


class Memory(NamedTuple):
    total: Tensor


class ToyModel(nn.Module):
    forms_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.dropout = nn.Dropout(0.2)
        self.decay = nn.Parameter(torch.full((6,), 0.5))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY)
        self.head.weight = self.embedding.weight

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.decay}

    def forward(self, tokens: Tensor, state: tuple[Memory] | None = None) -> tuple[Tensor, tuple[Memory]]:
        total = torch.zeros(len(tokens), 6) if state is None else state[0].total
        outputs = []
        for step in self.dropout(self.embedding(tokens)).unbind(1):
            total = self.decay.sigmoid() * total + step.float()
            outputs.append(total)
        return self.head(self.norm(torch.stack(outputs, 1))), (Memory(total),)

    def loss(self, tokens: Tensor, targets: Tensor, state: tuple[Memory] | None = None) -> tuple[Tensor, tuple[Memory]]:
        logits, state = self(tokens, state)
        return negative_log_likelihood(logits, targets), state

    def initial_state(self, batch: int) -> tuple[Memory]:
        return (Memory(torch.zeros(batch, 6)),)

    def require_state(self, state: tuple[Memory], batch: int) -> None:
        require_layout("state.total", state[0].total, (batch, 6), torch.float32, self.decay.device)


@dataclass
class ToyData:
    batch_size: int = 3
    segment_length: int = 5
    n_tokens: int = 3 * 5 * 8 + 1

    vocab_size = output_size = VOCABULARY

    def build(self, *, rank: int = 0, world_size: int = 1) -> "ToyData":
        return self

    def source(self, split: str) -> StreamSource:
        # A rule to learn, and noise: each token is the sum of the two before it, one in five is drawn.
        random = np.random.default_rng(split == "train")
        tokens = random.integers(0, VOCABULARY, self.n_tokens)
        for i in range(2, len(tokens)):
            if i % 5:
                tokens[i] = (tokens[i - 1] + tokens[i - 2]) % VOCABULARY
        return StreamSource(
            tokens,
            batch_size=self.batch_size,
            segment_length=self.segment_length,
            training=split == "train",
        )


@dataclass
class ToyRecipe:
    def build(self, sizes: DataSizes) -> ToyModel:
        return ToyModel()


class ToyTask(Task):
    def sizes(self, data: ToyData, opened: ToyData) -> DataSizes:
        return DataSizes(VOCABULARY, VOCABULARY)


@dataclass(kw_only=True)
class ToyExperiment(Experiment):
    task = ToyTask()
    experiment: str = "toy"
    data: ToyData
    model: ToyRecipe = field(default_factory=ToyRecipe)

    def __post_init__(self) -> None:
        pass  # neither its task nor its model is registered


@pytest.fixture
def toy_model() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel()


def trainer_in(
    parent, name="run", *, scorer=evaluate, optimizer=None, schedule=None, averaging=None, data=None, **training
) -> Trainer:
    experiment = ToyExperiment(
        data=ToyData(**(data or {})),
        optimizer=OptimizerConfig(**{"learning_rate": 0.03, **(optimizer or {})}),
        schedule=ScheduleConfig(**(schedule or {})),
        averaging=AveragingConfig(**(averaging or {})),
        training=TrainingConfig(**{"tensorboard": False, "log_every": 1, "accelerator": "cpu", **training}),
    )
    return Trainer(experiment, RunFolder(parent / name), scorer)


@pytest.fixture
def make_trainer(tmp_path: Path):
    """make_trainer(folder_name, scorer=..., **training), other sections as optimizer={...}, data={...} and so on"""
    return partial(trainer_in, tmp_path)


class Batches:
    """A source of these batches, the same in every epoch."""

    def __init__(self, *batches: Batch) -> None:
        self.batches, self.batch_size = batches, len(batches[0].inputs)

    def __len__(self) -> int:
        return len(self.batches)

    def batch(self, epoch: int, step: int) -> Batch:
        return self.batches[step]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=1000)


def same_weights(one: Trainer, other: Trainer) -> bool:
    ours, theirs = one.model.state_dict().values(), other.model.state_dict().values()
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def scorer(*losses: float):
    """An evaluation that gives these losses, one after the other."""
    left = iter(losses)
    return lambda model, source: EvaluationResult(float(next(left)), 1.0, 1.0, 0.5, 10, 1.0, 10.0)


def on_call(number: int, happens=lambda: os.kill(os.getpid(), signal.SIGTERM)):
    """An evaluation during which something happens when it is called for the n-th time: the user ends the process."""
    calls = iter(range(1, 1000))

    def evaluation(model, source, **options):
        if next(calls) == number:
            happens()
        return evaluate(model, source, **options)

    return evaluation


_UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


@pytest.fixture
def file_size_limit():
    """file_size_limit(n): from now on no file may grow beyond n bytes, as on a full disk"""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda n_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, _UNLIMITED[1]))
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The report of a test, which may go to a long file, is written before fixtures end."""
    try:
        return (yield)
    finally:
        if "file_size_limit" in item.fixturenames:
            resource.setrlimit(resource.RLIMIT_FSIZE, _UNLIMITED)
