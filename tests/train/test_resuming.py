"""Runs with registered optimisers resume as any others."""

import io

import pytest
import torch
from rich.console import Console

from recurra.train import config as optimizer_registry
from recurra.train.config import register_optimizer


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
