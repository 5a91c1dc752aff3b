"""The generalised delta rule: the paper's recurrence, in plain torch, with all gradients. Kernels: test_kernels.py."""

import numpy as np
import pytest
import torch
from tests.gradients import differentiate
from tests.ops.delta_rule.conftest import assert_near
from tests.ops.delta_rule.conftest import draw_generalised as draw
from torch.autograd import gradcheck, gradgradcheck

from recurra import delta_rule
from recurra.ops.delta_rule import generalised_delta_rule
from recurra.ops.delta_rule.reference import generalised_chunk, generalised_recurrent


def by_matrices(q, k, v, a, read, write, state):
    """S_t = S_{t-1} (diag(a_t) + read_t write_t^T) + v_t k_t^T, y_t = S_t q_t with columns, as in the paper."""
    q, k, v, a, read, write, state = (x.detach().numpy() for x in (q, k, v, a, read, write, state))
    y, last = np.zeros_like(v), np.zeros_like(state)
    for n, head in np.ndindex(q.shape[0], q.shape[2]):
        s = state[n, head].T
        for t in range(q.shape[1]):
            q_t, k_t, v_t, a_t, r_t, z_t = (x[n, t, head] for x in (q, k, v, a, read, write))
            s = s @ (np.diag(a_t) + np.outer(r_t, z_t)) + np.outer(v_t, k_t)
            y[n, t, head] = s @ q_t
        last[n, head] = s.T
    return torch.from_numpy(y), torch.from_numpy(last)


@pytest.mark.parametrize("length", [1, 4, 5, 64, 65, 150])  # chunks have 64 steps
def test_the_references_are_the_papers_recurrence(length):
    inputs = draw(length)
    for function in (generalised_recurrent, generalised_chunk, generalised_delta_rule):
        torch.testing.assert_close(function(*inputs), by_matrices(*inputs), rtol=1e-12, atol=1e-12)
    expected = differentiate(generalised_recurrent, inputs)
    assert_near(differentiate(generalised_chunk, inputs), expected, inputs)
    assert_near(differentiate(generalised_chunk, [x.float() for x in inputs]), expected, inputs)


def test_the_delta_rule_is_a_case():
    q, _, v, a, read, _, state = draw(70)
    b = torch.rand(2, 70, 2, 1, dtype=torch.float64)
    found = generalised_delta_rule(q, b * read, v, a, a * read, -b * read, state)
    torch.testing.assert_close(found, delta_rule(q, read, v, a, b, state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [generalised_recurrent, generalised_chunk])
def test_first_and_second_derivatives(function, monkeypatch):
    monkeypatch.setattr("recurra.ops.delta_rule.reference._CHUNK", 2)
    leaves = [x.requires_grad_() for x in draw(3, 1, 2, 1, batch=1)]
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


def test_halves_and_sizes_of_zero():
    inputs = [x.float() for x in draw(5)]
    y, last = generalised_delta_rule(*(x.bfloat16() for x in inputs[:6]), inputs[6])
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    y, last = generalised_delta_rule(*(x[:, :0] for x in inputs[:6]), inputs[6])
    assert y.shape == (2, 0, 2, 5)
    assert torch.equal(last, inputs[6])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "bad", "kind", "message"),
    [
        ("q", torch.ones(2, 5), ValueError, r"q is float32 \(2, 5\) on cpu; expected \(B, L, H, d\)"),
        ("read", torch.ones(2, 3, 2, 1), ValueError, r"read is .*; expected \(2, 3, 2, 3\)"),
        ("write", torch.ones(2, 3, 2, 3).to("meta"), ValueError, "write is .* on meta; expected a tensor on cpu, as q"),
        ("a", torch.ones(2, 3, 2, 3).long(), TypeError, "a is .*; expected real floating-point numbers"),
        ("v", torch.ones(2, 4, 2, 5), ValueError, r"v is .*; expected \(2, 3, 2, 5\)"),
        ("state", torch.ones(2, 2, 5, 3), ValueError, r"state is .*; expected \(2, 2, 3, 5\)"),
        ("backend", "fast", ValueError, "backend is 'fast'; expected one of auto, reference, numba, triton"),
        ("state", torch.ones(2, 2, 3, 5).double(), ValueError, "the kernels compute in float32, not in float64"),
    ],
)
def test_bad_input(name, bad, kind, message):
    names = ("q", "k", "v", "a", "read", "write", "state")
    given = dict(zip(names, (x.float() for x in draw(3)))) | {"backend": "numba"}
    with pytest.raises(kind, match=message):
        generalised_delta_rule(**given | {name: bad})
