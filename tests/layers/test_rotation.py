"""Rotation by positions."""

import cmath
import math

import pytest
import torch

from recurra.layers.rotation import phases, rotate


def test_phases_are_those_of_xpos():
    expected = [[n * 10000 ** (-2 * i / 6) for i in range(3)] for n in (-2, 0, 7)]
    actual = phases(torch.tensor([-2, 0, 7]), 6)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("position", [0, 1, -5, 999_999])
def test_pairs_are_complex_numbers_turned(position):
    """In float32 too, at large positions: the phase is computed in float64."""
    x = torch.randn(3, 6)
    y = rotate(x, phases(torch.tensor([position]), 6))
    for row, turned in zip(x.tolist(), y.tolist()):
        for i in range(3):
            angle = math.fmod(position * 10000 ** (-2 * i / 6), 2 * math.pi)
            expected = complex(row[2 * i], row[2 * i + 1]) * cmath.exp(1j * angle)
            assert abs(complex(turned[2 * i], turned[2 * i + 1]) - expected) < 1e-6
    assert y.dtype == torch.float32


def test_products_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    scores = [
        (rotate(q, phases(torch.tensor([n]), 8)) * rotate(k, phases(torch.tensor([n - 3]), 8))).sum()
        for n in (3, 0, 500_000)
    ]
    torch.testing.assert_close(scores[1:], [scores[0]] * 2, rtol=1e-9, atol=1e-9)
    assert (scores[0] - (q * k).sum()).abs() > 0.1
