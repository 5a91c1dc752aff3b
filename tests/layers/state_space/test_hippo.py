"""HiPPO-N in its eigenbasis, against the matrix as it is defined."""

import pytest
import torch

from recurra.layers.state_space import _hippo_normal_modes


def hippo_legs(size):
    """The definition, entry by entry."""
    a = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(i):
            a[i, j] = -((2 * i + 1) ** 0.5) * (2 * j + 1) ** 0.5
        a[i, i] = -(i + 1)
    return a


@pytest.mark.parametrize("size", [2, 4, 10, 64])
def test_modes_and_their_conjugates_are_the_normal_part(size):
    p = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()
    normal = hippo_legs(size) + torch.outer(p, p)
    frequency, vectors = _hippo_normal_modes(size)
    eigenvalues = torch.complex(torch.full_like(frequency, -0.5), frequency)
    half = vectors @ torch.diag(eigenvalues) @ vectors.mH
    torch.testing.assert_close(half + half.conj(), normal.to(half.dtype), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [2, 4, 10, 64])
def test_kept_modes_have_positive_frequencies_and_unit_vectors(size):
    frequency, vectors = _hippo_normal_modes(size)
    assert frequency.shape == (size // 2,)
    assert (frequency > 0).all()
    assert (frequency.diff() > 0).all()
    identity = torch.eye(size // 2, dtype=vectors.dtype)
    torch.testing.assert_close(vectors.mH @ vectors, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors.T @ vectors, 0 * identity, rtol=0, atol=1e-12)  # orthogonal to their conjugates
