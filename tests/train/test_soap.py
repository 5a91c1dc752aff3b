"""SOAP, from pytorch-optimizer: what reaches it, what it keeps, and that a run with it resumes."""

import signal

import pytest
import torch
from tests.train.conftest import on_call, quiet, same_weights
from tests.train.test_loop import records
from torch import nn

from recurra.train.config import _soap

pytest.importorskip("pytorch_optimizer", reason="needs the extra optimizers: pip install recurra[optimizers]")


def test_a_whole_update_is_adams_in_the_eigenvectors():
    """Of the second update, after a first that only begins the averages: its sign in that basis is what moves."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    optimizer = _soap([{"params": [weight]}], lr=0.1, betas=(0.0, 0.0), eps=1e-12)
    first = torch.randn(4, 3, dtype=torch.float64)
    weight.grad = first.clone()
    optimizer.step()
    assert not weight.any()
    left, right = (torch.linalg.eigh(side).eigenvectors for side in (first @ first.T, first.T @ first))
    weight.grad = torch.randn(4, 3, dtype=torch.float64)
    expected = -0.1 * left @ (left.T @ weight.grad @ right).sign() @ right.T
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stop_at", [1, 5])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(make_trainer, stop_at):
    settings = {"log_every": 1, "save_every": 4, "eval_every": 1}
    optimizer = {"algorithm": "soap", "precondition_frequency": 2}
    whole = make_trainer("whole", optimizer=optimizer, **settings)
    whole.fit(quiet())
    first = make_trainer("parts", optimizer=optimizer, scorer=on_call(stop_at), **settings)
    assert first.fit(quiet()).received == signal.SIGTERM
    second = make_trainer("parts", optimizer=optimizer, **settings)
    second.resume("last")
    assert second.position.step == stop_at
    second.fit(quiet())
    assert records(second) == records(whole)
    assert same_weights(second, whole)


def test_sharded_parameters_are_refused():
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.device_mesh = "of two ranks"
    with pytest.raises(ValueError, match=r"^training\.strategy is fsdp; expected ddp with optimizer\.algorithm soap"):
        _soap([{"params": [weight]}])
