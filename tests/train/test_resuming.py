"""Checkpoints of the right form whose parts do not fit: refused by name, and the trainer stays as it was."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from recurra.train import config as optimizer_registry
from recurra.train.checkpoint import CheckpointError, _save_checkpoint, load_checkpoint
from recurra.train.config import register_optimizer
from recurra.train.loop import Trainer


@pytest.fixture
def interrupted(make_trainer) -> Trainer:
    trainer = make_trainer(max_steps=5, averaging={"start_step": 2})
    trainer.fit(Console(file=io.StringIO()))
    return trainer


def rewrite(trainer: Trainer, change) -> None:
    path = trainer.checkpoints.find("last")
    saved = load_checkpoint(path)
    change(saved)
    _save_checkpoint(path, saved)


def first_state(saved) -> dict:
    return next(iter(saved["optimizer"]["state"].values()))


CHANGES = {
    "average": (
        lambda saved: saved["average"]["weights"].update({"decay": torch.ones(7)}),
        r"a checkpoint of another model \(it has decay \(7,\), here \(6,\)\)",
    ),
    "moment": (
        lambda saved: first_state(saved).update({"exp_avg": torch.ones(2, 3)}),
        r"exp_avg of parameter 0 of the optimiser in .* is float32 \(2, 3\) on cpu; expected one of shape",
    ),
    "number": (
        lambda saved: saved["optimizer"]["state"].update({99: first_state(saved)}),
        r"of parameter 99 of the optimiser in .*; expected one of shape of no parameter",
    ),
    "groups": (
        lambda saved: saved["optimizer"]["param_groups"].pop(),
        r"the optimiser in .* is one with groups of \[.*\] parameters; expected",
    ),
    "layers": (
        lambda saved: saved.update(state=[]),
        r"\.safetensors: state is a list of 0 in the saved state; expected a list of 1",
    ),
    "state": (
        lambda saved: saved["state"][0].__setitem__(0, saved["state"][0][0][:, :1]),
        r"\.safetensors: state\.total is float32 \(3, 1\) on cpu; expected float32 \(3, 6\)",
    ),
    "python": (
        lambda saved: saved["random"].update(python=[3, [1, 2], None]),
        r"the state of the random numbers is one that a generator does not take \(state vector is the wrong size\)",
    ),
    "numpy": (
        lambda saved: saved["random"]["numpy"]["state"]["key"].pop(),
        "the state of the random numbers is one that a generator does not take",
    ),
    "torch": (
        lambda saved: saved["random"].update(torch=torch.zeros(5, dtype=torch.uint8)),
        "the state of the random numbers is one that a generator does not take",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parts_that_do_not_fit_are_refused_and_nothing_changes(interrupted, make_trainer, name):
    change, message = CHANGES[name]
    rewrite(interrupted, change)
    trainer = make_trainer(epochs=2, averaging={"start_step": 2})
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    drawn = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    with pytest.raises(CheckpointError, match=message):
        trainer.resume("last")
    assert all(torch.equal(tensor, before[key]) for key, tensor in trainer.model.state_dict().items())
    assert drawn == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert trainer.position.step == 0


def test_the_unchanged_one_is_resumed(interrupted, make_trainer):
    rewrite(interrupted, lambda saved: None)
    trainer = make_trainer(epochs=2, averaging={"start_step": 2})
    trainer.resume("last")
    assert trainer.position.step == interrupted.position.step


class RowMeans(torch.optim.SGD):
    """Keeps a number for each row of a parameter, as Adafactor does, and one of its own beside its parameters."""

    n_steps = 0

    def step(self, closure=None):
        self.n_steps += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            row = self.state[parameter].setdefault("row", torch.zeros(len(parameter)))
            row += parameter.grad.reshape(len(parameter), -1).mean(1) / self.n_steps
            parameter.grad += row.reshape(-1, *[1] * (parameter.ndim - 1))
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "n_steps": self.n_steps}

    def load_state_dict(self, saved):
        self.n_steps = saved["n_steps"]
        super().load_state_dict({key: value for key, value in saved.items() if key != "n_steps"})


@pytest.fixture
def row_means(monkeypatch):
    monkeypatch.setattr(optimizer_registry._optimizers, "_entries", dict(optimizer_registry._optimizers._entries))
    register_optimizer("row-means")(RowMeans)
    return {"optimizer": {"algorithm": "row-means"}, "epochs": 1, "save_every": 5}


def test_a_registered_optimiser_resumes_with_tensors_of_any_shape_and_keys_of_its_own(row_means, make_trainer):
    whole = make_trainer(**row_means)
    whole.fit(Console(file=io.StringIO()))
    again = make_trainer(**row_means)
    again.resume("previous")
    assert (again.position.step, again.snapshot()["optimizer"]["n_steps"]) == (5, 5)
    again.fit(Console(file=io.StringIO()))
    weights = whole.model.state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in again.model.state_dict().items())


def test_what_a_registered_optimiser_refuses_changes_nothing(row_means, make_trainer):
    make_trainer(**row_means).fit(Console(file=io.StringIO()))
    again = make_trainer(**row_means)
    before = {key: tensor.clone() for key, tensor in again.model.state_dict().items()}
    again.optimizer.load_state_dict = lambda saved: 1 / 0
    with pytest.raises(ZeroDivisionError):
        again.resume("last")
    assert all(torch.equal(tensor, before[key]) for key, tensor in again.model.state_dict().items())
    assert again.state is None


def test_what_no_optimiser_can_have_saved_is_refused(row_means, make_trainer):
    trainer = make_trainer(**row_means)
    trainer.fit(Console(file=io.StringIO()))
    rewrite(trainer, lambda saved: saved["optimizer"]["state"].update({99: first_state(saved)}))
    with pytest.raises(CheckpointError, match="of shape of no parameter"):
        make_trainer(**row_means).resume("last")
