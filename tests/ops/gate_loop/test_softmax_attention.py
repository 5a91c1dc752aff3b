"""GateLoop's softmax attention against its equations (22)-(23), one distance between two steps at a time."""

import math

import pytest
import torch
from tests.gradients import differentiate

from recurra.ops.gate_loop.reference import softmax_attention

# queries, steps, window: one, within a block, over blocks of 64, after a past, with a window that cuts or does not
SIZES = [
    (1, 1, None),
    (5, 5, None),
    (131, 131, None),
    (131, 131, 1),
    (131, 131, 9),
    (131, 131, 130),
    (3, 90, None),
    (66, 90, 70),
    (1, 20, 20),
    (3, 150, 100),
]
GATES = ["scalar", "vector", "complex scalar", "complex vector"]


def draw(n_queries: int, n_steps: int, gates: str, heads: int = 2, d_qk: int = 3, d_v: int = 2):
    """Float64 inputs, exact in float32: transitions of magnitude below 1, most near 1, of any phase or sign."""
    shape = (2, n_steps, heads)
    q, k, v = (torch.randn(*shape, d).double() for d in (d_qk, d_qk, d_v))
    magnitude = torch.sigmoid(2 + 2 * torch.randn(*shape, d_qk if "vector" in gates else 1))
    phase = torch.randn(magnitude.shape)
    a = torch.polar(magnitude, phase) if "complex" in gates else magnitude * phase.sign()
    return [q[:, n_steps - n_queries :], k, v, a.to(torch.promote_types(a.dtype, torch.float64))]


def by_the_equations(q, k, v, a, window=None):
    """Row n: softmax over m of Re(sum_d q_nd k_md prod_{l=m+1..n} a_ld) / sqrt(d), times the values."""
    n = torch.arange(k.shape[1] - q.shape[1], k.shape[1])
    scores, values, decayed_q = [], [], q
    for distance in range(k.shape[1] if window is None else min(window, k.shape[1])):
        m = (n - distance).clamp(min=0)
        score = (decayed_q * k[:, m]).sum(-1).real / math.sqrt(q.shape[3])
        scores.append(torch.where((n >= distance)[:, None], score, -torch.inf))
        values.append(v[:, m])
        decayed_q = decayed_q * a[:, m]
    weights = torch.stack(scores, -1).softmax(-1)
    return torch.einsum("bnhm,bnhvm->bnhv", weights.to(v.dtype), torch.stack(values, -1))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("size", [size for size in SIZES if size[1] < 100], ids=str)
def test_outputs_and_gradients_are_the_equations(size, gates):
    inputs, window = draw(*size[:2], gates), size[2]
    expected = differentiate(lambda *x: by_the_equations(*x, window), inputs)
    actual = differentiate(lambda *x: softmax_attention(*x, window=window), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gates", ["scalar", "complex vector"])
@pytest.mark.parametrize("size", [size for size in SIZES if size[1] >= 100], ids=str)
def test_long_sequences(size, gates):
    inputs = draw(*size[:2], gates, heads=1)
    with torch.no_grad():
        expected = by_the_equations(*inputs, size[2])
        torch.testing.assert_close(softmax_attention(*inputs, window=size[2]), expected, rtol=1e-10, atol=1e-12)
        single = (x.to(torch.complex64 if x.is_complex() else torch.float32) for x in inputs)
        y = softmax_attention(*single, window=size[2])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert y.dtype == torch.float32


def test_as_the_paper_writes_it():
    """softmax(M_-inf(Re((Q * Pi)(K * Pi^-1)^T))) V, with the cumulative product and its inverse."""
    q, k, v, a = (x[:, :, 0] for x in draw(12, 12, "complex vector"))
    pi = a.cumprod(1)
    scores = ((q * pi) @ (k / pi).transpose(1, 2)).real / math.sqrt(3)
    scores[:, ~torch.ones(12, 12, dtype=torch.bool).tril()] = -torch.inf
    y = softmax_attention(*(x[:, :, None] for x in (q, k, v, a)))[:, :, 0]
    torch.testing.assert_close(y, scores.softmax(-1) @ v, rtol=1e-11, atol=1e-12)


def test_complex_queries_keys_and_values():
    q, k, v, a = draw(20, 20, "complex vector")
    q, k, v = (torch.complex(x, x.flip(1)) for x in (q, k, v))
    y = softmax_attention(q, k, v, a)
    torch.testing.assert_close(y, by_the_equations(q, k, v, a), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(softmax_attention(q, k, v, a.abs()), by_the_equations(q, k, v, a.abs()))


@pytest.mark.parametrize("gates", GATES)
def test_gates_of_exactly_zero(gates):
    """In value and gradient, in the block and before it, and several of them."""
    q, k, v, a = draw(70, 80, gates)
    a[:, [3, 5, 40, 41, 76]] = 0
    expected = differentiate(by_the_equations, [q, k, v, a])
    assert expected[4][:, 40].abs().max() > 0
    torch.testing.assert_close(differentiate(softmax_attention, [q, k, v, a]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gate", [0.1, 1e-12, 1e-30])
def test_products_that_underflow(gate):
    """Pi is 0 in float32 after two transitions of 1e-30: nothing may divide by it."""
    q, k, v, a = draw(80, 80, "vector")
    a = (a.sign() * gate).float().double()
    expected = differentiate(by_the_equations, [q, k, v, a])
    actual = differentiate(softmax_attention, [x.float() for x in (q, k, v, a)])
    for one, other in zip(actual, expected):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_autocast_changes_nothing():
    inputs = [x.float() for x in draw(70, 80, "vector")]
    with torch.autocast("cpu", torch.bfloat16):
        y = softmax_attention(*inputs)
    assert torch.equal(y, softmax_attention(*inputs))


@pytest.mark.parametrize("window", [None, 16])
def test_memory_has_no_square_of_the_steps_for_every_channel(window):
    """Memory for the gradients of vector transitions: scores, and per block of 64 steps its past in all channels."""
    length, d = 512, 32
    q, k, v, a = (torch.rand(1, length, 1, d, requires_grad=True) for _ in range(4))
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = softmax_attention(q, k, v, a, window=window)
    seen = length if window is None else window + 64
    assert sum(kept.values()) < 5 * length * seen * (1 + d / 64) + 40 * length * d < length * length * d
    y.sum().backward()
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 0, 3), (2, 4, 2, 0)], ids=str)
def test_empty_input(shape):
    q, k, a = (torch.ones(*shape[:3], 2, dtype=torch.float16) for _ in range(3))
    y = softmax_attention(q, k, torch.ones(shape, dtype=torch.float16), a)
    assert y.shape == shape
    assert y.dtype == torch.float16
    assert softmax_attention(q[:, :0], k, torch.ones(shape), a).shape == (shape[0], 0, *shape[2:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q is a list; expected a torch.Tensor"),
        (
            {"q": torch.ones(2, 5, 2, 3)},
            ValueError,
            r"q is float32 \(2, 5, 2, 3\) on cpu; expected at most 4 steps, those of k",
        ),
        ({"a": torch.ones(2, 4, 2, 2)}, ValueError, r"expected \(2, 4, 2, 1\) or \(2, 4, 2, 3\)"),
        ({"window": 0}, ValueError, "window is 0; expected at least 1"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change, error, message, unchecked):
    fitting = {name: torch.ones(2, 4, 2, 3) for name in "qkva"}
    with pytest.raises(error, match=message):
        softmax_attention(**{**fitting, **change})
