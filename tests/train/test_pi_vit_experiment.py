"""PI-ViT as an experiment: poses reach the loss in training, and settings that do not apply are refused."""

from types import SimpleNamespace

import pytest
import torch

from recurra.data.batches import Batch, Poses
from recurra.train.config import TrainingConfig
from recurra.train.experiment import Experiment
from recurra.train.loop import Trainer
from recurra.train.run_folder import RunFolder
from recurra.video.data import VideoConfig
from recurra.video.pi_vit import PIViTConfig

SMALL = {"patch_size": 4, "n_layer": 1, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8, "drop_path": 0.0}
RECIPE = PIViTConfig(**SMALL, n_joints=3, d_skeleton=5)


class Source:
    batch_size = 2

    def __len__(self):
        return 1

    def batch(self, epoch, step):
        clip = torch.linspace(-1, 1, 2 * 2 * 3 * 64).view(2, 2, 3, 8, 8)
        poses = Poses(torch.linspace(0, 7, 24).view(2, 2, 3, 2), torch.ones(2, 1, 5))
        return Batch(clip, torch.tensor([[1], [3]]), continues=False, poses=poses)


def test_poses_reach_the_loss(tmp_path):
    data = SimpleNamespace(output_size=4, source=lambda split: Source())
    training = TrainingConfig(max_steps=1, tensorboard=False, accelerator="cpu")
    config = VideoConfig(path=str(tmp_path), n_frames=2, n_segments=1, image_size=8)
    experiment = Experiment(experiment="video-pi-vit", data=config, model=RECIPE, training=training)
    trainer = Trainer(experiment, RunFolder(tmp_path / "run"), lambda *_: None, open_data=lambda *_: data)
    batch = Source().batch(0, 0)
    loss, _ = trainer._loss(batch, 2)
    expected, _ = trainer.model.loss(batch.inputs, batch.targets, poses=batch.poses)
    torch.testing.assert_close(loss, expected.sum())
    before = trainer.model.joint_induction.joints.bias.clone()
    trainer._update()
    assert not torch.equal(trainer.model.joint_induction.joints.bias, before)


def test_poses_for_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.poses is .*; expected null but for PI-ViT"):
        Experiment(experiment="video-timesformer", data=VideoConfig(path=str(tmp_path), poses="poses"))
