"""The poses of the person in a clip, and which joint is seen in which patch."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from recurra.checks import kind_of, require, sentence


class Poses(NamedTuple):
    """The poses in the clips of a batch, for training only.

    joints: (x, y) of each joint in each frame, in pixels of the clip from its upper left corner; NaN where a joint was
    not found. Joints outside of the clip's picture have their places there.
    features: what a skeleton model says of each segment; NaN where there is nothing, None if there is none at all.
    """

    joints: Float[Tensor, "B T J 2"]
    features: Float[Tensor, "B S F"] | None = None


def joint_targets(
    joints: Float[Tensor, "N T J 2"], *, image_size: int, patch_size: int
) -> tuple[Float[Tensor, "N P T J"], Bool[Tensor, "N T J"]]:
    """Return which joints lie in each patch of each frame, 1 or 0, and which joints were found.

    Patch (row, column) sees the places with row <= y / patch_size < row + 1, and x likewise. Patches are numbered row
    by row. A joint outside of the picture lies in no patch; one that was not found has zeros that do not count.

    Raises:
        ValueError: patch_size does not divide image_size.
    """
    require(image_size % patch_size == 0, "patch_size", patch_size, f"a divisor of image_size = {image_size}")
    edge = image_size // patch_size
    found = joints.isfinite().all(-1)
    inside = found & ((joints >= 0) & (joints < image_size)).all(-1)
    column, row = joints.where(inside[..., None], 0.0).div(patch_size).floor().long().unbind(-1)
    seen = functional.one_hot(row * edge + column, edge**2) * inside[..., None]
    return seen.movedim(-1, 1).to(joints.dtype), found


def require_poses(poses: Poses, clip: Tensor, *, n_segments: int, n_joints: int, d_features: int) -> None:
    """Refuse poses that are not of these clips or of another skeleton.

    Raises:
        ValueError: naming what came and what was expected.
    """
    expected = (*clip.shape[:2], n_joints, 2)
    if tuple(poses.joints.shape) != expected:
        raise ValueError(sentence("poses.joints", kind_of(poses.joints), f"(batch, frames, n_joints, 2) = {expected}"))
    expected = (clip.shape[0], n_segments, d_features)
    if poses.features is not None and tuple(poses.features.shape) != expected:
        came = kind_of(poses.features)
        raise ValueError(sentence("poses.features", came, f"(batch, segments, d_skeleton) = {expected}"))
