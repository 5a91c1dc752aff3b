"""Rotations by positions, and encodings of distances."""

import cmath
import math

import pytest
import torch

from recurra.layers.positions import phases, rotate, sinusoids

ANGLES = phases(torch.arange(5), 6)[:, None]


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


def layouts():
    dense = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    odd = torch.randn(2, 5, 3, 7, dtype=torch.float64)
    return {
        "dense": dense,
        "a part of a projection": torch.randn(2, 5, 3, 14, dtype=torch.float64)[..., 2:8],
        "an odd offset": odd[..., 1:],
        "an odd stride": odd[..., :6],
        "heads in front": dense.transpose(1, 2).contiguous().transpose(1, 2),
        "channels apart": torch.randn(2, 5, 6, 3, dtype=torch.float64).transpose(2, 3),
        "one for all": torch.randn(1, 5, 1, 6, dtype=torch.float64).expand(2, 5, 3, 6),
    }


@pytest.mark.parametrize("layout", layouts())
def test_with_a_gradient_it_is_the_formula(layout):
    x = layouts()[layout]
    with torch.no_grad():
        expected = rotate(x, ANGLES)
        back = rotate(expected.cos(), -ANGLES)
    y = rotate(x.requires_grad_(), ANGLES)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    (gradient,) = torch.autograd.grad(y, x, expected.cos())
    torch.testing.assert_close(gradient, back, rtol=1e-13, atol=1e-13)


def test_second_derivatives():
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, ANGLES).sin(), x)


def test_angles_may_need_a_gradient():
    x, angles = torch.randn(2, 5, 1, 6, dtype=torch.float64, requires_grad=True), ANGLES.clone().requires_grad_()
    assert torch.autograd.gradcheck(rotate, (x, angles))


def test_a_batch_of_gradients():
    x = torch.randn(2, 5, 1, 6, dtype=torch.float64, requires_grad=True)
    y, several = rotate(x, ANGLES), torch.randn(3, 2, 5, 1, 6, dtype=torch.float64)
    together = torch.func.vmap(lambda one: torch.autograd.grad(y, x, one, retain_graph=True)[0])(several)
    alone = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in several]
    torch.testing.assert_close(together, torch.stack(alone))


def test_sines_then_cosines_from_the_largest_distance_down():
    found = sinusoids(7, 6, like=torch.zeros(1, dtype=torch.float64))
    for row, distance in enumerate(range(6, -1, -1)):
        angles = [distance / 10000 ** (2 * i / 6) for i in range(3)]
        expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        torch.testing.assert_close(found[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_far_distances_are_clamped():
    like = torch.zeros(1)
    free, clamped = sinusoids(9, 4, like=like), sinusoids(9, 4, like=like, clamp_len=5)
    assert torch.equal(clamped[3:], free[3:])
    assert torch.equal(clamped[:4], free[3].expand(4, 4))
