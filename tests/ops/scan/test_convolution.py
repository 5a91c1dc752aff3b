"""The time-invariant recurrence by the Fourier transform."""

import itertools
import math

import pytest
import torch
from tests.gradients import require_same_gradients
from torch.autograd import gradcheck, gradgradcheck

from recurra import linear_scan
from recurra.ops.scan.convolution import convolution_scan, transform_length

FULL_TYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def bound(a, b, dtype) -> float:
    """Rounding of an exact-to-rounding transform, eps log2(n) |kernel| |b|, and of the powers, eps L of each."""
    length = b.shape[1]
    kernel = a.abs().double().max() ** torch.arange(length)
    norms = kernel.norm() * b.abs().double().norm(dim=1).max()
    return torch.finfo(dtype).eps * (8 * math.log2(4 * length) + length) * norms.item()


@pytest.mark.parametrize("b_type", FULL_TYPES, ids=str)
@pytest.mark.parametrize("a_type", FULL_TYPES, ids=str)
def test_equals_the_recurrence(a_type, b_type, gates, plain_scan):
    for length, a_shape in itertools.product((1, 2, 3, 17, 64, 127), ((), (1,), (5,), (3, 5), (3, 1))):
        a, b = gates(*a_shape, dtype=a_type), torch.randn(2, length, 3, 5, dtype=b_type)
        h = convolution_scan(a, b)
        assert h.dtype == torch.promote_types(a_type, b_type)
        expected = plain_scan(a, b)
        torch.testing.assert_close(h.to(expected.dtype), expected, rtol=0, atol=bound(a, b, h.dtype))


def test_transforms_are_as_short_as_small_factors_allow():
    smooth = sorted(2**i * 3**j * 5**k for i in range(14) for j in range(9) for k in range(6))
    for n in range(1, 5000):
        assert transform_length(n) == next(length for length in smooth if length >= n)


@pytest.mark.parametrize("gate", [0.0, 1.0, -1.0, 1e-30, 1.05])
def test_particular_gates(gate):
    a = torch.tensor([gate], dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 33, 4, dtype=torch.float64, requires_grad=True)
    results = [f(a, b) for f in (convolution_scan, lambda a, b: linear_scan(a, b, backend="reference"))]
    require_same_gradients(*results, [a, b], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_derivatives_by_differences(length, dtype, gates):
    a, b = gates(2, dtype=dtype, requires_grad=True), torch.randn(1, length, 2, dtype=dtype, requires_grad=True)
    assert gradcheck(convolution_scan, (a, b))
    assert gradgradcheck(convolution_scan, (a, b))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_empty_input(shape):
    assert convolution_scan(torch.ones(1, dtype=torch.complex64), torch.ones(shape)).shape == shape
    assert convolution_scan(torch.ones(1, dtype=torch.complex64), torch.ones(shape)).dtype == torch.complex64


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("a", "b", "kind", "message"),
    [
        (0.5, torch.ones(2, 4, 3), TypeError, r"a is a float; expected a torch\.Tensor"),
        (torch.ones(3, dtype=torch.int64), torch.ones(2, 4, 3), TypeError, "a is int64 .*; expected float32"),
        (torch.ones(3), torch.ones(2, 4, 3).bfloat16(), TypeError, "b is bfloat16 .*; expected float32"),
        (torch.ones(3), torch.ones(4), ValueError, r"b is float32 \(4,\) on cpu; expected \(B, L, \*channels\)"),
        (torch.ones(2), torch.ones(2, 4, 3), ValueError, r"a is float32 \(2,\) on cpu; expected .* channels \(3,\)"),
        (torch.ones(4, 3), torch.ones(2, 4, 3), ValueError, r"a is float32 \(4, 3\)"),
    ],
)
def test_bad_input(a, b, kind, message):
    with pytest.raises(kind, match=message):
        convolution_scan(a, b)
