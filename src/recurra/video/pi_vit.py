"""The skeleton induction modules of PI-ViT (Reilly and Das, arXiv 2311.18840): tasks on a block's tokens in training.

Published, in paper and code: 2D-SIM maps each patch token to d_model -> 256 -> joints, without an activation between,
and learns by binary cross-entropy which joints the patch sees. 3D-SIM maps the mean of all patch tokens to the width of
a skeleton model's features, is pulled towards these by their mean squared difference, and classifies the action from
what it projected. Ours: what has no target does not count, and losses are per segment.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_at_least
from recurra.data.batches import Poses, joint_targets, require_poses
from recurra.layers.embeddings import IGNORED_TARGET, require_targets
from recurra.layers.norms import at_least_float32
from recurra.models.registry import VideoSizes, register_model
from recurra.models.shell import negative_log_likelihood
from recurra.video.timesformer import (
    TimeSformer,
    TimeSformerConfig,
    TimeSformerState,
    initialise,
    require_clip,
)

_D_JOINTS = 256
"""Channels between the two linear layers of 2D-SIM, as in the published code."""


class _JointInduction(nn.Module):
    """2D-SIM: which joints does each patch see?"""

    def __init__(self, d_model: int, n_joints: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(d_model, _D_JOINTS)
        self.joints = nn.Linear(_D_JOINTS, n_joints)

    def forward(self, patches: Float[Tensor, "N P T d_model"]) -> Float[Tensor, "N P T J"]:
        """Return the logit of each joint in each patch."""
        return self.joints(self.narrow(patches))

    def loss(
        self, patches: Float[Tensor, "N P T d_model"], joints: Float[Tensor, "N T J 2"], *, image_size: int
    ) -> Float[Tensor, " N"]:
        """Return the mean binary cross-entropy over patches and the joints that were found, of each segment."""
        logits = at_least_float32(self(patches))
        edge = round(patches.shape[1] ** 0.5)
        # places in float32: in half precision a joint could slip into the next patch
        targets, found = joint_targets(joints.float(), image_size=image_size, patch_size=image_size // edge)
        losses = functional.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
        return losses.where(found, 0.0).sum((1, 2)) / found.sum((1, 2)).clamp(min=1)


class _SkeletonInduction(nn.Module):
    """3D-SIM: what would a skeleton model see, and which action is it?"""

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
        """Return the mean squared difference to the features, and -log p of the action, of each segment."""
        projected, logits = self(patches)
        there = features.isfinite().all(-1)
        wanted = features.where(there[:, None], 0.0).to(torch.promote_types(projected.dtype, torch.float32))
        aligned = (at_least_float32(projected) - wanted).square().mean(-1)
        classified = negative_log_likelihood(logits[:, None], targets[:, None])[:, 0]
        return aligned.where(there, 0.0), classified.where(there, 0.0)


INDUCTION = ("joint_induction.", "skeleton_induction.")
"""What the names of the weights begin with that only training uses."""


@dataclass(frozen=True, kw_only=True)
class PIViTConfig(TimeSformerConfig):
    """A PI-ViT; the defaults are those published for Toyota Smarthome."""

    n_joints: int = 13
    """Joints of the 2D skeletons."""
    d_skeleton: int = 216
    """Channels of the skeleton model's features; those of the published Hyperformer are 216."""
    joints_after: int = 1
    """The block, counted from 1, whose tokens learn where the joints are (2D-SIM)."""
    skeleton_after: int | None = None
    """The block, counted from 1, whose tokens learn the skeleton's features (3D-SIM); the last one if None."""
    joint_weight: float = 1.6
    """Weight of the loss of 2D-SIM."""
    skeleton_weight: float = 1.0
    """Weight of the difference between projected and skeleton features in 3D-SIM."""
    skeleton_class_weight: float = 1.0
    """Weight of the cross-entropy of the classifier in 3D-SIM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, n_joints=self.n_joints, d_skeleton=self.d_skeleton)
        blocks = f"a block, 1 to n_layer = {self.n_layer}"
        require(1 <= self.joints_after <= self.n_layer, "joints_after", self.joints_after, blocks)
        last = self.skeleton_after
        require(last is None or 1 <= last <= self.n_layer, "skeleton_after", last, blocks)
        require_at_least(0, joint_weight=self.joint_weight, skeleton_weight=self.skeleton_weight)
        require_at_least(0, skeleton_class_weight=self.skeleton_class_weight)


class TaskLosses(NamedTuple):
    """The losses of each segment by task, without their weights; 0 where there is no target.

    classes: -log p of the class. joints: of 2D-SIM. skeleton, skeleton_classes: the two of 3D-SIM.
    """

    classes: Float[Tensor, "B S"]
    joints: Float[Tensor, "B S"]
    skeleton: Float[Tensor, "B S"]
    skeleton_classes: Float[Tensor, "B S"]


@register_model("pi-vit", config=PIViTConfig, reads=VideoSizes)
class PIViT(TimeSformer):
    """A TimeSformer with two auxiliary tasks, from which its tokens learn about poses.

    Called without poses, it is a TimeSformer, and a TimeSformer can start from its run without the modules. `loss`
    with poses adds to -log p of the class the losses of both tasks by their weights (the published ones by
    default). A segment without a target learns nothing from poses either: our choice.

    Published: 2D-SIM after the first block, 3D-SIM after the last, before the final norm, on the mean over all patches
    ("global" alignment). The paper also tries other blocks, alignment by frames and several modules at once, which are
    not here.
    """

    learns_from_poses = True
    config: PIViTConfig

    def __init__(self, config: PIViTConfig) -> None:
        super().__init__(config)
        self.joint_induction = _JointInduction(config.d_model, config.n_joints)
        self.skeleton_induction = _SkeletonInduction(config.d_model, config.d_skeleton, config.n_classes)
        for module in (self.joint_induction, self.skeleton_induction):
            module.apply(initialise)

    def loss(
        self,
        clip: Float[Tensor, "B T C H W"],
        targets: Int[Tensor, "B S"],
        state: Any = None,
        poses: Poses | None = None,
    ) -> tuple[Float[Tensor, "B S"], TimeSformerState]:
        """Return the loss of each segment: -log p of its class in nats, and with poses the weighted other tasks.

        Args:
            clip, targets, state: as `VideoModel.loss`.
            poses: of the clips, or None.
        """
        if poses is None:
            return super().loss(clip, targets, state)
        if state is not None:
            self.require_state(state, clip.shape[0])
        losses, config = self.task_losses(clip, targets, poses), self.config
        skeleton = config.skeleton_weight * losses.skeleton + config.skeleton_class_weight * losses.skeleton_classes
        return losses.classes + config.joint_weight * losses.joints + skeleton, TimeSformerState()

    def task_losses(self, clip: Float[Tensor, "B T C H W"], targets: Int[Tensor, "B S"], poses: Poses) -> TaskLosses:
        """Return the losses of each segment by task.

        Segments whose target is `IGNORED_TARGET` have a loss of 0.
        """
        config = self.config
        require_clip(clip, config)
        n_segments = clip.shape[1] // config.n_frames
        require_targets(targets, (clip.shape[0], n_segments))
        require_poses(poses, clip, n_segments=n_segments, n_joints=config.n_joints, d_features=config.d_skeleton)
        segments = clip.unflatten(1, (n_segments, config.n_frames)).flatten(0, 1)
        joints = poses.joints.unflatten(1, (n_segments, config.n_frames)).flatten(0, 1)
        flat = targets.flatten()
        tokens = self.encoder.with_times(*self.embedding(segments))
        in_skeleton = flat.new_zeros(len(flat), dtype=joints.dtype)
        in_joints, in_classes = in_skeleton, in_skeleton
        for number, block in enumerate(self.encoder.blocks, 1):
            tokens = block(tokens)
            patches = tokens[:, 1:].unflatten(1, (config.n_patches, config.n_frames))
            if number == config.joints_after:
                in_joints = self.joint_induction.loss(patches, joints, image_size=config.image_size)
            if number == (config.skeleton_after or config.n_layer) and poses.features is not None:
                in_skeleton, in_classes = self.skeleton_induction.loss(patches, poses.features.flatten(0, 1), flat)
        classes = negative_log_likelihood(self.classify(tokens)[:, None], flat[:, None])[:, 0]
        counted = flat != IGNORED_TARGET
        losses = (classes, in_joints.where(counted, 0.0), in_skeleton.where(counted, 0.0), in_classes)
        return TaskLosses(*(each.view_as(targets) for each in losses))
