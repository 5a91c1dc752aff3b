"""The Triton kernels of the GRU's steps beside the reference. tests/test_triton.py runs this file."""

import itertools
import sys

import pytest
import torch
from tests.gradients import differentiate, require_near
from tests.quick_interpreter import DEVICE, INTERPRETED, NUMBER, TOLERANCE, sampled

from recurra.ops.cells import _gru_triton as gru_triton
from recurra.ops.cells.gru import GRUCell, RecurrentWeights, gru_sequence, gru_sequence_reference

NAMES = ("y", "last state", "d projected", "d h", "d gates", "d candidate")
# one sequence and step; one more sequence than a program takes; several tiles of channels, the last with a single one
SIZES = [(1, 1, 1), (17, 3, 5), (2, 5, 33), (33, 2, 16)]
OUTPUTS = {"both": (0, 1), "outputs": (0,), "last state": (1,)}


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch):
    """In the interpreter, the kernels with small tiles take what is on the CPU; on a card they do so themselves."""
    if INTERPRETED:
        monkeypatch.setattr(gru_triton, "_OUTPUTS", 16)
        monkeypatch.setattr(gru_triton, "_INPUTS", 16)
        module = sys.modules["recurra.ops.cells.gru"]
        monkeypatch.setattr(module, "_kernels", lambda projected, h: gru_triton)


@pytest.fixture
def launched(monkeypatch):
    """What the kernels were asked to do."""
    calls = []
    for name in ("forward", "backward"):
        original = getattr(gru_triton, name)
        monkeypatch.setattr(gru_triton, name, lambda *x, f=original, n=name: calls.append(n) or f(*x))
    return calls


def draw(batch, length, size, number=NUMBER):
    shapes = [(batch, length, 3 * size), (batch, size), (2 * size, size), (size, size)]
    wide = torch.promote_types(number, torch.float32)
    kinds = [number, wide, number, number]
    drawn = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    scales = [1.0, 1.0, size**-0.5, size**-0.5]
    return [(x * scale).to(DEVICE, kind) for x, scale, kind in zip(drawn, scales, kinds)]


def run(function, tensors, chosen=(0, 1)):
    def call(projected, h, *weights):
        return function(GRUCell(1, h.shape[1]), projected, h, RecurrentWeights(*weights))

    return differentiate(call, tensors, chosen)


def assert_near(actual, expected, tolerance=TOLERANCE):
    require_near(actual, expected, tolerance, NAMES)


@pytest.mark.parametrize(
    ("sizes", "which"),
    sampled(itertools.product(SIZES, OUTPUTS), lambda sizes, which: which == "both" or sizes == (17, 3, 5)),
    ids=str,
)
def test_outputs_and_gradients(sizes, which, launched):
    tensors, chosen = draw(*sizes), OUTPUTS[which]
    assert_near(run(gru_sequence, tensors, chosen), run(gru_sequence_reference, tensors, chosen))
    assert launched == ["forward", "backward"]


@pytest.mark.parametrize(
    "number",
    sampled([(torch.float32,), (torch.bfloat16,), (torch.float16,)], lambda number: number != torch.float16),
    ids=str,
)
def test_half_types_as_under_autocast(number):
    """States and sums are float32; what enters a product is rounded to the weights' type."""
    tensors = draw(3, 4, 20, number)
    wide = run(gru_sequence_reference, [x.double() for x in tensors])
    actual = run(gru_sequence, tensors)
    assert [x.dtype for x in actual] == [torch.float32] * 2 + [number, torch.float32, number, number]
    assert_near([x.double() for x in actual], wide, max(8 * torch.finfo(number).eps, 2e-5))


def test_memory_layouts():
    """Any strides, gradients from elsewhere, and memory full of NaN beside the tensors."""
    projected, h, gates, candidate = draw(3, 4, 5)
    expected = run(gru_sequence_reference, [projected, h, gates, candidate])
    around = torch.full((4, 3, 40), torch.nan, dtype=NUMBER, device=DEVICE)
    around[..., 1:16] = projected.transpose(0, 1)
    strided = [around.transpose(0, 1)[..., 1:16], h.t().contiguous().t(), gates.t().contiguous().t(), candidate]
    assert_near(run(gru_sequence, strided), expected)
    spread = torch.full((3, 4, 10), torch.nan, dtype=NUMBER, device=DEVICE)[..., ::2].copy_(projected[..., :5])
    assert not spread.is_contiguous()
    steps = gru_triton.forward(projected, h, gates, candidate)
    both = [gru_triton.backward(steps, gates, candidate, d_y, None) for d_y in (spread, spread.contiguous())]
    torch.testing.assert_close(*both, rtol=0, atol=0)
