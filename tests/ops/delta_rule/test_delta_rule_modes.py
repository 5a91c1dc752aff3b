"""All ways to compute the delta rule give the same outputs, last state and gradients."""

import numpy as np
import pytest
import torch
from tests.gradients import differentiate, require_near
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp, vmap

from recurra import delta_rule
from recurra.ops.delta_rule import operator

LENGTHS = (1, 2, 5, 17, 64, 65, 150)  # chunks have 64 steps: less than one, one, and three of which the last is short
MODES = ("recurrent", "chunk", "auto")  # "fused" has a file of its own
NAMES = ("y", "last state", "dq", "dk", "dv", "da", "db", "dstate")


def by_matrices(inputs):
    """S_t = S_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T, y_t = S_t q_t with columns, as in the papers."""
    q, k, v, a, b, state = (x.detach().numpy() for x in inputs)
    y, last = np.zeros_like(v), np.zeros_like(state)
    for n, head in np.ndindex(q.shape[0], q.shape[2]):
        s = state[n, head].T
        for t in range(q.shape[1]):
            key = k[n, t, head][:, None]
            keep = np.eye(len(key)) - b[n, t, head] * key @ key.T
            s = (s * a[n, t, head]) @ keep + b[n, t, head] * v[n, t, head][:, None] @ key.T
            y[n, t, head] = s @ q[n, t, head]
        last[n, head] = s.T
    return torch.from_numpy(y), torch.from_numpy(last)


def run(inputs, mode):
    return differentiate(lambda *x: delta_rule(*x, mode=mode), inputs)


def assert_near(actual, expected, tolerance, what):
    require_near(actual, expected, tolerance, [f"{name} of {what}" for name in NAMES], mixed=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_mode_is_the_papers_recurrence(draw, length, mode):
    inputs = draw(length)
    for actual, expected in zip(delta_rule(*inputs, mode=mode), by_matrices(inputs)):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [*((length, (2, 3, 5)) for length in LENGTHS), (1, (1, 7, 1)), (65, (1, 7, 1)), (1, (3, 1, 4)), (65, (3, 1, 4))],
    ids=str,
)
def test_all_modes_agree(draw, length, sizes):
    """Float64 to 1e-10, float32 to 1e-5 relative: outputs, last state and all gradients, the incoming state's too."""
    inputs = draw(length, *sizes)
    expected = run(inputs, "recurrent")
    assert_near(run(inputs, "chunk"), expected, 1e-10, "chunk in float64")
    for mode in MODES:
        actual = run(inputs.to(torch.float32), mode)
        assert {x.dtype for x in actual} == {torch.float32}
        assert_near(actual, expected, 1e-5, f"{mode} in float32")


@pytest.mark.parametrize("mode", ["recurrent", "chunk"])
def test_first_and_second_derivatives(draw, monkeypatch, mode):
    monkeypatch.setattr("recurra.ops.delta_rule.reference._CHUNK", 2)
    leaves = [x.requires_grad_() for x in draw(3, 1, 2, 1, batch=1)]
    function = lambda *x: delta_rule(*x, mode=mode)  # noqa: E731
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("mode", ["recurrent", "chunk"])
def test_transforms_of_functions(draw, mode):
    inputs = draw(70)
    function = lambda *x: delta_rule(*x, mode=mode)  # noqa: E731
    one_by_one = lambda *x: tuple(y[0] for y in function(*(z[None] for z in x)))  # noqa: E731
    torch.testing.assert_close(vmap(one_by_one)(*inputs), function(*inputs), rtol=1e-11, atol=1e-11)
    directions = tuple(torch.randn_like(x) for x in inputs)
    outputs, tangents = jvp(function, tuple(inputs), directions)
    leaves = [x.requires_grad_() for x in inputs]
    weights = tuple(torch.randn_like(y) for y in outputs)
    gradients = torch.autograd.grad(function(*leaves), leaves, weights)
    forwards = sum((t * w).sum() for t, w in zip(tangents, weights))
    torch.testing.assert_close(forwards, sum((g * d).sum() for g, d in zip(gradients, directions)))


def test_a_stream_may_be_cut_anywhere(draw):
    inputs = draw(150)
    whole = delta_rule(*inputs)
    outputs, state = [], inputs.state
    for i, piece in enumerate(zip(*(x.split([1, 3, 64, 65, 10, 7], 1) for x in inputs[:5]))):
        y, state = delta_rule(*piece, state, mode=MODES[i % 3])
        outputs.append(y)
    torch.testing.assert_close((torch.cat(outputs, 1), state), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("length", [1, 3, 17, 70])
def test_decays_of_exactly_zero(draw, length, share):
    """A decay of 0 forgets everything, but its own gradient is not 0: for some, several in a chunk, and all."""
    inputs = draw(length)
    chosen = torch.rand(inputs.a.shape) < share
    chosen[:, -1] = True  # nothing comes after the newest
    inputs = inputs._replace(a=inputs.a.masked_fill(chosen, 0))
    expected = run(inputs, "recurrent")
    assert expected[5][chosen].abs().min() > 0
    assert_near(run(inputs, "chunk"), expected, 1e-10, f"{share} zeros")


def test_a_thousand_reflections_keep_the_state_and_lose_nothing_in_float32(draw):
    """b = 2 and a = 1: every transition is a reflection. Keys that repeat make the triangular system full."""
    inputs = draw(1000, batch=1)
    k = torch.nn.functional.normalize(inputs.k, dim=-1)
    k[:, 300:600] = k[:, :1]
    inputs = inputs._replace(k=k, v=0 * inputs.v, a=torch.ones_like(inputs.a), b=torch.full_like(inputs.b, 2))
    expected = delta_rule(*inputs, mode="recurrent")
    torch.testing.assert_close(torch.linalg.matrix_norm(expected[1]), torch.linalg.matrix_norm(inputs.state))
    actual = delta_rule(*inputs.to(torch.float32), mode="chunk")
    torch.testing.assert_close([x.double() for x in actual], list(expected), rtol=1e-4, atol=1e-4)


def test_a_key_of_length_one_is_overwritten_and_others_stay():
    """With b = 1 the state gives back the newest value of each of its orthogonal keys."""
    values = torch.randn(1, 8, 1, 5, dtype=torch.float64)
    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 3, 1, 0, 1, 3]][None, :, None]
    ones = torch.ones(1, 8, 1, dtype=torch.float64)
    for mode in MODES:
        y, last = delta_rule(keys, keys, values, ones, ones, mode=mode)
        torch.testing.assert_close(y, values)
        torch.testing.assert_close(last[0, 0], values[0, [5, 6, 2, 7], 0])


@pytest.mark.parametrize("mode", MODES)
def test_the_eigenvalue_along_the_key_can_be_negative(mode):
    """a (1 - b |k|^2) along the key, a across it."""
    k = torch.tensor([0.6, 0.8], dtype=torch.float64)[None, None, None]
    state = torch.stack([k[0, 0, 0], torch.tensor([-0.8, 0.6], dtype=torch.float64)], -1)[None, None]
    of = lambda x: torch.full((1, 1, 1), x, dtype=torch.float64)  # noqa: E731
    _, last = delta_rule(k, k, torch.zeros_like(k), of(0.5), of(1.7), state, mode=mode)
    torch.testing.assert_close(last, state * torch.tensor([0.5 * (1 - 1.7), 0.5], dtype=torch.float64))


@pytest.mark.parametrize("mode", [*MODES, "fused"])
def test_half_types_are_computed_in_float32_also_under_autocast(draw, mode):
    inputs = draw(70, 2, 16, 16)
    half = inputs._replace(**{name: getattr(inputs, name).bfloat16() for name in "qkv"})
    half = half._replace(a=inputs.a.float(), b=inputs.b.float(), state=inputs.state.float())
    expected = delta_rule(*half.to(torch.float32), mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        y, last = delta_rule(*half, mode=mode)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y, expected[0].bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(last, expected[1], rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "length", "d_qk", "d_v"), [(0, 3, 2, 2), (2, 0, 2, 3), (2, 3, 0, 2), (2, 3, 2, 0)])
def test_empty_inputs(draw, batch, length, d_qk, d_v):
    inputs = draw(length, 2, d_qk, d_v, batch=batch)
    y, last = delta_rule(*inputs)
    assert torch.equal(y, torch.zeros_like(inputs.v))
    assert torch.equal(last, inputs.state)


def test_auto_takes_what_was_measured_as_the_fastest(draw, monkeypatch):
    taken = []
    for name in ("recurrent", "chunk", "fused"):
        function = lambda *x, name=name, **_: (taken.append(name), x[2], x[-1])[1:]  # noqa: E731
        monkeypatch.setitem(operator._MODES, name, function)
    for length in (1, 4, 5, 200):
        delta_rule(*draw(length))
    assert taken == ["recurrent", "recurrent", "chunk", "chunk"]
    for length in (1, 200):
        delta_rule(*draw(length).to(torch.float32))
        delta_rule(*(x.requires_grad_() for x in draw(length).to(torch.float32)))
    assert taken[4:] == ["fused"] * 4
