"""PI-ViT: its auxiliary losses, and that nothing of them is left without poses."""

import math
from dataclasses import fields

import pytest
import torch
from tests.models.test_timesformer import moved
from torch.nn import functional

from recurra.data.batches import Poses
from recurra.video.pi_vit import PIViT, PIViTConfig
from recurra.video.timesformer import TimeSformer, TimeSformerConfig, TimeSformerState

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
TASKS = ("classes", "joints", "skeleton", "skeleton_classes")


def small(**options) -> PIViTConfig:
    sizes = {"n_classes": 5, "n_frames": 3, "image_size": 8, "patch_size": 4, "n_layer": 2, "d_model": 12}
    sizes |= {"n_heads": 3, "d_channel_mixing": 20, "drop_path": 0.0, "n_joints": 4, "d_skeleton": 7}
    return PIViTConfig(**{**sizes, **options})


def make(**options) -> PIViT:
    return moved(PIViT(small(**options)).double())


def draw(batch=2, segments=2):
    """Clips, targets and poses; a tenth of the joints is missing, and some lie outside of the picture."""
    clip = torch.randn(batch, 3 * segments, 3, 8, 8, dtype=torch.float64)
    joints = torch.rand(batch, 3 * segments, 4, 2, dtype=torch.float64) * 10 - 1
    joints[torch.rand(joints.shape[:3]) < 0.1] = math.nan
    joints[0, 0, 0] = math.nan
    features = torch.randn(batch, segments, 7, dtype=torch.float64)
    return clip, torch.randint(5, (batch, segments)), Poses(joints, features)


def tokens_after(model, clip, number):
    """The patch tokens after a block, segment by segment, caught on their way through `forward`."""
    caught = []
    handle = model.encoder.blocks[number - 1].register_forward_hook(lambda *args: caught.append(args[2]))
    model(clip)
    handle.remove()
    return caught[0][:, 1:]


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


@pytest.mark.parametrize("layout", ["transposed", "flat"])
def test_targets_of_another_layout_are_refused(unchecked, layout):
    """As many numbers in another order would be those of other segments."""
    model = make()
    clip, targets, poses = draw(segments=3)
    other = targets.T if layout == "transposed" else targets.flatten()
    assert other.shape != targets.shape
    with pytest.raises(ValueError, match=r"^targets is .*; expected shape"):
        model.task_losses(clip, other, poses)


@pytest.mark.parametrize(("joints_after", "skeleton_after"), [(1, None), (2, 1)])
def test_losses_equal_an_independent_computation(joints_after, skeleton_after):
    model = make(joints_after=joints_after, skeleton_after=skeleton_after)
    clip, targets, poses = draw()
    losses = model.task_losses(clip, targets, poses)
    for_joints = tokens_after(model, clip, joints_after)
    for_skeleton = tokens_after(model, clip, skeleton_after or 2)
    sim_2d, sim_3d = model.joint_induction, model.skeleton_induction
    logits, _ = model(clip)
    for sequence in range(2):
        for segment in range(2):
            number, counted = 2 * sequence + segment, []
            for patch in range(4):
                for frame in range(3):
                    chances = linear(sim_2d.joints, linear(sim_2d.narrow, for_joints[number, 3 * patch + frame]))
                    for joint in range(4):
                        x, y = poses.joints[sequence, 3 * segment + frame, joint].tolist()
                        if math.isnan(x):
                            continue
                        left, top = 4 * (patch % 2), 4 * (patch // 2)
                        inside = left <= x < left + 4 and top <= y < top + 4
                        chance = torch.sigmoid(chances[joint])
                        counted.append(-torch.log(chance if inside else 1 - chance))
            torch.testing.assert_close(losses.joints[sequence, segment], torch.stack(counted).mean(), **CLOSE)
            features = linear(sim_3d.project, for_skeleton[number].mean(0))
            aligned = ((features - poses.features[sequence, segment]) ** 2).mean()
            torch.testing.assert_close(losses.skeleton[sequence, segment], aligned, **CLOSE)
            label = targets[sequence, segment]
            log_p = torch.log_softmax(linear(sim_3d.classify, features), 0)[label]
            torch.testing.assert_close(losses.skeleton_classes[sequence, segment], -log_p, **CLOSE)
            expected = functional.cross_entropy(logits[sequence, segment], label)
            torch.testing.assert_close(losses.classes[sequence, segment], expected, **CLOSE)


def test_the_loss_is_the_weighted_sum():
    model = make(joint_weight=0.3, skeleton_weight=0.5, skeleton_class_weight=0.7)
    clip, targets, poses = draw()
    each = model.task_losses(clip, targets, poses)
    loss, state = model.loss(clip, targets, poses=poses)
    assert state == TimeSformerState()
    expected = each.classes + 0.3 * each.joints + 0.5 * each.skeleton + 0.7 * each.skeleton_classes
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(model.loss(clip, targets)[0], each.classes, **CLOSE)


def test_what_is_missing_does_not_count():
    model = make()
    clip, targets, poses = draw()
    targets[0, 1] = -100
    poses.joints[1, :3] = math.nan
    poses.features[1, 1, 2] = math.nan
    losses = model.task_losses(clip, targets, poses)
    assert not any(getattr(losses, task)[0, 1] for task in TASKS)
    assert losses.joints[1, 0] == 0.0
    assert losses.skeleton[1, 1] == losses.skeleton_classes[1, 1] == 0.0
    assert int((torch.stack(losses) == 0.0).sum()) == 7
    torch.stack(losses).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    alone = model.task_losses(clip, targets, Poses(poses.joints))
    assert not alone.skeleton.any()
    assert not alone.skeleton_classes.any()
    torch.testing.assert_close(alone.joints, losses.joints, **CLOSE)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_teaches_the_backbone(task):
    model = make()
    clip, targets, poses = draw()
    getattr(model.task_losses(clip, targets, poses), task).sum().backward()
    taught = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {"embedding.class_token", "embedding.patches.projection.weight"} & taught
    assert any("encoder.blocks.0" in name for name in taught)
    assert any("encoder.blocks.1" in name for name in taught) == (task != "joints")


def test_without_poses_it_is_a_timesformer():
    model = make(head_dropout=0.5).eval()
    clip, _, _ = draw()
    shared = {field.name: getattr(model.config, field.name) for field in fields(TimeSformerConfig)}
    plain = TimeSformer(TimeSformerConfig(**shared)).double().eval()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if "induction" not in name})
    with torch.no_grad():
        for parameter in (*model.joint_induction.parameters(), *model.skeleton_induction.parameters()):
            parameter.fill_(math.nan)
    assert torch.equal(plain(clip)[0], model(clip)[0])


def test_other_poses_and_states_are_refused():
    model = make()
    clip, targets, poses = draw()
    with pytest.raises(ValueError, match=r"poses.joints is .*; expected .* = \(2, 6, 4, 2\)"):
        model.loss(clip, targets, poses=Poses(poses.joints[:, :3]))
    with pytest.raises(TypeError, match="state is a tuple"):
        model.loss(clip, targets, (), poses)
    with pytest.raises(ValueError, match="clip is 4 frames long"):
        model.loss(clip[:, :4], targets, poses=poses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"joints_after": 0}, "joints_after is 0; expected a block, 1 to n_layer = 2"),
        ({"joint_weight": -1.0}, "joint_weight is -1.0; expected at least 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
