"""The generalised delta rule: the paper's recurrence, by every way of computing it, with all gradients."""

import math

import numpy as np
import pytest
import torch
from tests.gradients import differentiate
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp, vmap
from torch.nn import functional

from recurra import delta_rule
from recurra.ops.delta_rule import generalised_delta_rule
from recurra.ops.delta_rule.reference import generalised_chunk, generalised_recurrent

# vectors of 16, blocks of 64; backwards, blocks of 32 columns, or of 16 from 129 key channels on
SIZES = [(1, 1), (3, 15), (5, 17), (64, 64), (65, 33), (100, 7), (130, 40)]
NAMES = ("y", "last state", "dq", "dk", "dv", "da", "dread", "dwrite", "dstate")


def draw(length, heads=2, d_qk=3, d_v=5, batch=2):
    """Float64 inputs, exact in float32, with unit vectors that read and up to as much written, as in RWKV-7."""
    q, k, read, rate, decay = torch.randn(5, batch, length, heads, d_qk, dtype=torch.float64)
    v = torch.randn(batch, length, heads, d_v, dtype=torch.float64)
    read, rate = functional.normalize(read, dim=-1), torch.sigmoid(rate)
    state = torch.randn(batch, heads, d_qk, d_v, dtype=torch.float64)
    inputs = q, 0.3 * k, v, torch.exp(-0.6 * torch.sigmoid(decay)), read, -rate * read, state
    return [x.float().double() for x in inputs]


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


def assert_near(actual, expected, inputs):
    """Sums of n products round n times, in either direction: by about sqrt(n) eps; four of them follow one another."""
    n_terms = inputs[0].shape[1] + inputs[0].shape[-1] + inputs[2].shape[-1]
    tolerance = 4 * math.sqrt(n_terms) * torch.finfo(actual[0].dtype).eps
    for name, mine, right in zip(NAMES, actual, expected, strict=True):
        assert mine.dtype == actual[0].dtype
        assert (mine.double() - right).abs().max() <= tolerance * right.abs().max(), name


@pytest.mark.parametrize("length", [1, 4, 5, 64, 65, 150])  # chunks have 64 steps
def test_the_references_are_the_papers_recurrence(length):
    inputs = draw(length)
    for function in (generalised_recurrent, generalised_chunk, generalised_delta_rule):
        torch.testing.assert_close(function(*inputs), by_matrices(*inputs), rtol=1e-12, atol=1e-12)
    expected = differentiate(generalised_recurrent, inputs)
    assert_near(differentiate(generalised_chunk, inputs), expected, inputs)
    assert_near(differentiate(generalised_chunk, [x.float() for x in inputs]), expected, inputs)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("d_qk", "d_v"), SIZES)
@pytest.mark.parametrize("length", [1, 2, 33, 65])
def test_the_kernels_are_the_reference(length, d_qk, d_v):
    """The forward pass keeps every 32nd state."""
    inputs = draw(length, 3, d_qk, d_v)
    single = [x.float() for x in inputs]
    kept = [x.clone() for x in single]
    actual = differentiate(lambda *x: generalised_delta_rule(*x, backend="numba"), single)
    assert_near(actual, differentiate(generalised_recurrent, inputs), inputs)
    assert all(map(torch.equal, single, kept))
    assert all(map(torch.equal, generalised_delta_rule(*single), actual))


@pytest.mark.parametrize("chosen", [[0], [1]], ids=["y", "last state"])
def test_gradients_of_one_result_alone(chosen):
    inputs = draw(35, 2, 5, 20)
    actual = differentiate(generalised_delta_rule, [x.float() for x in inputs], chosen)
    assert_near(actual, differentiate(generalised_recurrent, inputs, chosen), inputs)


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


def test_second_derivatives_and_transforms_go_around_the_kernels():
    inputs, found = [x.float() for x in draw(6, 1, 3, 4)], []
    for backend in ("numba", "reference"):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y, last = generalised_delta_rule(*leaves, backend=backend)
        first = torch.autograd.grad(y.square().sum() + last.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    fused, plain = (lambda *x, b=b: generalised_delta_rule(*x, backend=b) for b in ("numba", "reference"))
    one_by_one = lambda *x: tuple(y[0] for y in fused(*(z[None] for z in x)))  # noqa: E731
    torch.testing.assert_close(vmap(one_by_one)(*inputs), plain(*inputs))
    directions = tuple(torch.randn_like(x) for x in inputs)
    torch.testing.assert_close(jvp(fused, tuple(inputs), directions), jvp(plain, tuple(inputs), directions))


def test_tensors_in_any_layout_and_a_stream_cut_anywhere_have_the_same_bits():
    inputs = [x.float() for x in draw(40, 2, 9, 70)]
    expected = differentiate(generalised_delta_rule, inputs)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert all(map(torch.equal, differentiate(generalised_delta_rule, turned), expected))
    outputs, state = [], inputs[6]
    for piece in zip(*(x.split([1, 20, 3, 16], 1) for x in inputs[:6])):
        y, state = generalised_delta_rule(*piece, state)
        outputs.append(y)
    assert torch.equal(torch.cat(outputs, 1), expected[0])
    assert torch.equal(state, expected[1])


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
