"""Gradients between the segments of a run's model."""

import pytest
import torch

from recurra.analysis.gradient_flow import measure_gradient_flow
from recurra.train._figures import measure_gradients, measured_tokens
from recurra.train.run import open_run

N = 4
"""Tokens of a segment of runs/toy-crt."""


@pytest.fixture
def run(monkeypatch, scored):
    monkeypatch.chdir(scored)
    return open_run("runs/toy-crt")


def test_the_tokens_are_the_first_of_the_split(run):
    tokens = measured_tokens(run, "valid", segments=2, warm_up=1)
    assert tokens.tolist() == [run.data.tokens("valid")[: 3 * N].tolist()]


@pytest.mark.parametrize("warm_up", [0, 2])
def test_the_memory_is_that_of_the_warm_up(run, warm_up):
    tokens = measured_tokens(run, segments=2, warm_up=warm_up)
    state = run.model.hidden(tokens[:, : warm_up * N])[1] if warm_up else None
    expected = measure_gradient_flow(run.model, tokens[:, warm_up * N :], state)
    found = measure_gradients(run, tokens, warm_up=warm_up)
    # the warm-up runs without a gradient there, so that the RNN's steps are not those of the kernels
    torch.testing.assert_close(found.total, expected.total, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 1}, "segments is 1; expected at least 2"),
        ({"segments": 40}, r"split test of run toy-crt is 28 tokens long; expected at least 176 for 4 \+ 40 segments"),
    ],
)
def test_impossible_stretches_are_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        measured_tokens(run, **options)
