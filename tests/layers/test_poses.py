"""Which joint is seen in which patch."""

import math

import pytest
import torch

from recurra.data.batches import Poses, joint_targets, require_poses


def test_targets_of_a_hand_made_example():
    """A picture of 8 pixels with patches of 4: numbers 0 and 1 in the upper row, 2 and 3 in the lower."""
    nan = math.nan
    first = [[0.0, 0.0], [5.0, 1.0], [3.99, 4.0], [7.9, 7.9]]
    second = [[8.0, 1.0], [-0.1, 2.0], [nan, 3.0], [4.0, 3.9]]
    targets, found = joint_targets(torch.tensor([[first, second]]), image_size=8, patch_size=4)
    assert targets.shape == (1, 4, 2, 4)
    assert targets[0, :, 0].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert targets[0, :, 1].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert found.tolist() == [[[True] * 4, [True, True, False, True]]]


def test_patches_divide_the_picture():
    with pytest.raises(ValueError, match="patch_size is 3; expected a divisor of image_size = 8"):
        joint_targets(torch.zeros(1, 1, 1, 2), image_size=8, patch_size=3)


@pytest.mark.parametrize(
    ("poses", "message"),
    [
        (Poses(torch.zeros(2, 6, 3, 2)), r"poses.joints is float32 \(2, 6, 3, 2\).*expected .* = \(2, 6, 4, 2\)"),
        (Poses(torch.zeros(2, 6, 4, 2), torch.zeros(2, 1, 5)), r"poses.features is .*expected .* = \(2, 2, 5\)"),
    ],
)
def test_poses_of_other_clips_are_refused(poses, message):
    with pytest.raises(ValueError, match=message):
        require_poses(poses, torch.zeros(2, 6, 3, 8, 8), n_segments=2, n_joints=4, d_features=5)
