"""Position encoding: one number at a time."""

import math

import torch

from recurra.layers.positions import sinusoids


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


def test_type_follows_the_example_and_is_computed_in_float32_at_least():
    half = sinusoids(300, 8, like=torch.zeros(1, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, sinusoids(300, 8, like=torch.zeros(1)).bfloat16())
