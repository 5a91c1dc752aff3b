"""The skeleton induction modules of PI-ViT (Reilly and Das, arXiv 2311.18840): tasks on a block's tokens in training.

Published, in paper and code: 2D-SIM maps each patch token to d_model -> 256 -> joints, without an activation between,
and learns by binary cross-entropy which joints the patch sees. 3D-SIM maps the mean of all patch tokens to the width of
a skeleton model's features, is pulled towards these by their mean squared difference, and classifies the action from
what it projected. Ours: what has no target does not count, and losses are per segment.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.poses import joint_targets
from recurra.layers.precision import at_least_float32
from recurra.models.likelihood import negative_log_likelihood

D_JOINTS = 256
"""Channels between the two linear layers of 2D-SIM, as in the published code."""


class JointInduction(nn.Module):
    """2D-SIM: which joints does each patch see?

    Args:
        d_model: channels of the tokens.
        n_joints: joints of the skeleton.
    """

    def __init__(self, d_model: int, n_joints: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(d_model, D_JOINTS)
        self.joints = nn.Linear(D_JOINTS, n_joints)

    def forward(self, patches: Float[Tensor, "N P T d_model"]) -> Float[Tensor, "N P T J"]:
        """Return the logit of each joint in each patch."""
        return self.joints(self.narrow(patches))

    def loss(
        self, patches: Float[Tensor, "N P T d_model"], joints: Float[Tensor, "N T J 2"], *, image_size: int
    ) -> Float[Tensor, " N"]:
        """Return the mean binary cross-entropy over patches and the joints that were found, of each segment.

        Args:
            patches: the tokens of all patches.
            joints: (x, y) in pixels of the frames; see `recurra.layers.poses.joint_targets`.
            image_size: pixels of a frame's edge.
        """
        logits = at_least_float32(self(patches))
        edge = round(patches.shape[1] ** 0.5)
        # places in float32: in half precision a joint could slip into the next patch
        targets, found = joint_targets(joints.float(), image_size=image_size, patch_size=image_size // edge)
        losses = functional.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
        return losses.where(found, 0.0).sum((1, 2)) / found.sum((1, 2)).clamp(min=1)


class SkeletonInduction(nn.Module):
    """3D-SIM: what would a skeleton model see, and which action is it?

    Args:
        d_model: channels of the tokens.
        d_skeleton: channels of the skeleton model's features.
        n_classes: actions.
    """

    def __init__(self, d_model: int, d_skeleton: int, n_classes: int) -> None:
        super().__init__()
        self.project = nn.Linear(d_model, d_skeleton)
        self.classify = nn.Linear(d_skeleton, n_classes)

    def forward(
        self, patches: Float[Tensor, "N P T d_model"]
    ) -> tuple[Float[Tensor, "N d_skeleton"], Float[Tensor, "N n_classes"]]:
        """Return the features that a skeleton model would have, and the logits of the actions."""
        features = self.project(patches.mean((1, 2)))
        return features, self.classify(features)

    def loss(
        self, patches: Float[Tensor, "N P T d_model"], features: Float[Tensor, "N F"], targets: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Return the mean squared difference to the features, and -log p of the action, of each segment.

        Both are 0 for a segment whose features are not all finite.

        Args:
            patches: the tokens of all patches.
            features: of the skeleton model.
            targets: the class of each segment; `IGNORED_TARGET` gives 0 in the second loss.
        """
        projected, logits = self(patches)
        there = features.isfinite().all(-1)
        wanted = features.where(there[:, None], 0.0).to(torch.promote_types(projected.dtype, torch.float32))
        aligned = (at_least_float32(projected) - wanted).square().mean(-1)
        classified = negative_log_likelihood(logits[:, None], targets[:, None])[:, 0]
        return aligned.where(there, 0.0), classified.where(there, 0.0)
