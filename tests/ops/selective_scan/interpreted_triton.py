"""The Triton kernels of the selective scan beside the plain operations. tests/test_triton.py runs this file."""

import pytest
import torch
from tests.gradients import differentiate, require_near
from tests.quick_interpreter import DEVICE, INTERPRETED, NUMBER, TOLERANCE, sampled

from recurra.ops.selective_scan import _triton as kernels
from recurra.ops.selective_scan import selective_scan
from recurra.ops.selective_scan.reference import at_once

NAMES = ("y", "last state", "dx", "dstep", "da", "db", "dc", "dh0")
# batch, length, channels, modes: chunks of 4 steps and tiles of 4 channels, on a card of 16 and 32
SIZES = [(2, 6, 5, 3), (1, 1, 1, 1), (1, 4, 9, 2), (1, 19, 35, 5)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(kernels, "STEPS", 4)
        monkeypatch.setattr(kernels, "TILE", 4)


def draw(batch, length, row, modes, number=NUMBER):
    """x, step, a, b, c and h0; a and h0 are float32 beside halves."""
    narrow, wide = (batch, length, modes), (batch, length, row)
    shapes = wide, wide, (row, modes), narrow, narrow, (batch, modes, row)
    x, step, a, b, c, h0 = (torch.randn(shape, dtype=torch.float64).to(DEVICE) for shape in shapes)
    x, step, b, c = (tensor.to(number) for tensor in (x, step.exp(), b, c))
    wide = torch.promote_types(number, torch.float32)
    return [x, step, -a.exp().to(wide), b, c, h0.to(wide)]


def by_kernels(*inputs):
    return selective_scan(*inputs, backend="triton")


def assert_near(actual, expected, tolerance=TOLERANCE):
    require_near(actual, expected, tolerance, NAMES, mixed=True)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("sizes", sampled([(s,) for s in SIZES], lambda sizes: sizes[1] < 19), ids=str)
def test_outputs_and_gradients(sizes):
    tensors = draw(*sizes)
    assert_near(differentiate(by_kernels, tensors), differentiate(at_once, tensors))


@pytest.mark.parametrize("chosen", [0, 1])
def test_either_output_alone_sends_its_gradient_back(chosen):
    tensors = draw(1, 5, 3, 2)
    assert_near(differentiate(by_kernels, tensors, [chosen]), differentiate(at_once, tensors, [chosen]))


def test_bfloat16_beside_states_in_float32():
    """y and gradients are rounded once, states never; 3 roundings at most lie between the two sides."""
    tensors = draw(1, 5, 5, 2, torch.bfloat16)
    found = differentiate(by_kernels, tensors)
    bfloat16, float32 = torch.bfloat16, torch.float32
    assert [t.dtype for t in found] == [bfloat16, float32, *[bfloat16] * 2, float32, *[bfloat16] * 2, float32]
    expected = differentiate(at_once, [tensor.double() for tensor in tensors])
    assert_near([t.double() for t in found], expected, 3 * torch.finfo(bfloat16).eps)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)


def test_an_infinity_is_no_nan_beside_the_padding():
    """3 modes are padded to 4, and 5 channels to 8; numbers above 0 never subtract one infinity from another."""
    x, step, a, b, c, h0 = draw(1, 6, 5, 3)
    x, b, c, h0 = (tensor.abs() for tensor in (x, b, c, h0))
    x[0, 1, 2] = torch.inf
    found, expected = by_kernels(x, step, a, b, c, h0), at_once(x, step, a, b, c, h0)
    assert expected[0].isinf().sum() == 5
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine, right, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_front_door(monkeypatch):
    """By name it runs the kernels or says why not, any strides come in, and "auto" takes them only on a card."""
    launched, original = [], kernels.forward_into
    monkeypatch.setattr(kernels, "forward_into", lambda *given: launched.append(1) or original(*given))
    x, step, a, b, c, h0 = tensors = draw(2, 5, 3, 2, torch.float32)
    expected = at_once(*(t.double() for t in tensors))
    strided = [t.mT.contiguous().mT for t in tensors]
    for mine, right in zip(by_kernels(*strided), expected):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    selective_scan(*tensors)
    assert len(launched) == (1 if INTERPRETED else 2)
    with pytest.raises(ValueError, match=r"backend is 'triton'; expected .*a and h0 in float32 or float64"):
        by_kernels(x, step.double(), a, b, c, h0)
    with pytest.raises(ValueError, match=r"backend is 'triton'; expected .* up to 256 modes a channel, not 257"):
        by_kernels(*draw(1, 2, 1, 257, torch.float32))


def test_the_operators():
    tensors = draw(1, 5, 3, 2)
    found = torch.ops.recurra.selective_scan(*tensors, True, "triton")
    torch.library.opcheck(torch.ops.recurra.selective_scan.default, (*tensors, True, "triton"))
    given = (*found[:2], *tensors, found[2], "triton")
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.recurra.selective_scan_backward.default, given, test_utils=checks)
