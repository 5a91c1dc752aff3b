"""Experiments over videos: what the data give the model, the starting weights, a run and its resumption."""

from types import SimpleNamespace

import pytest
import torch
from tests.train.conftest import Batches, quiet

from recurra.data.batches import IGNORED_TARGET, Batch, Poses
from recurra.train.config import OptimizerConfig, TrainingConfig
from recurra.train.evaluate import evaluate
from recurra.train.experiment import Experiment
from recurra.train.loop import Trainer
from recurra.train.run_folder import RunFolder
from recurra.train.task import find_task
from recurra.video.crvit import CompactRecurrentViTConfig
from recurra.video.data import VideoConfig
from recurra.video.motions import MotionsConfig
from recurra.video.pi_vit import PIViTConfig
from recurra.video.timesformer import TimeSformerConfig

SMALL = {"patch_size": 8, "n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8, "drop_path": 0.0}
MODELS = {
    "motions-timesformer": TimeSformerConfig(**SMALL),
    "motions-crvit": CompactRecurrentViTConfig(**SMALL, head_dropout=0.5),
}


@pytest.fixture(scope="module")
def motions(tmp_path_factory) -> MotionsConfig:
    folder = tmp_path_factory.mktemp("motions") / "videos"
    sizes = {"n_videos": 20, "n_motions": 2, "frames_per_motion": 3, "image_size": 16, "n_frames": 3}
    config = MotionsConfig(path=str(folder), batch_size=6, eval_batch_size=2, workers=0, **sizes)
    config.build()
    return config


@pytest.fixture
def make(motions, tmp_path):
    def trainer(name, kind, *, init_from=None, **training):
        experiment = Experiment(
            experiment=kind,
            data=motions,
            init_from=init_from,
            model=MODELS[kind],
            optimizer=OptimizerConfig(learning_rate=0.01),
            training=TrainingConfig(**{"tensorboard": False, "log_every": 1, "accelerator": "cpu", **training}),
        )
        return Trainer(experiment, RunFolder(tmp_path / name), evaluate)

    return trainer


def test_accuracy_is_that_of_the_last_segment(make):
    trainer = make("run", "motions-crvit", max_steps=1, monitor="accuracy")
    batch = trainer.validation.batch(0, 0)
    assert (batch.targets[:, 0] == IGNORED_TARGET).all()
    trainer.fit(quiet())
    logits, _ = trainer.model.eval()(batch.inputs)
    expected = (logits[:, -1].argmax(-1) == batch.targets[:, -1]).float().mean().item()
    assert trainer.scores["best"]["accuracy"] == expected


def test_a_resumed_run_goes_on_with_its_own_weights(make, tmp_path):
    make("first", "motions-timesformer", max_steps=1).fit(quiet())
    settings = {"init_from": str(tmp_path / "first"), "epochs": 1, "save_every": 1}
    part = make("part", "motions-crvit", **settings)
    part.begin()
    part._update()
    part.checkpoints.save(1, part.snapshot())
    trained = {name: tensor.clone() for name, tensor in part.model.state_dict().items()}
    (tmp_path / "first").rename(tmp_path / "elsewhere")  # it is not looked for
    rest = make("part", "motions-crvit", **settings)
    rest.resume("last")
    assert rest.begin() == ""
    for name, tensor in rest.model.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    rest.fit(quiet())
    missing = make("missing", "motions-crvit", **settings)
    missing.resume("last")  # has no checkpoint: it starts anew, and misses the weights
    with pytest.raises(FileNotFoundError, match="which does not exist; expected a file or folder"):
        missing.fit(quiet())


# --- PI-ViT: poses reach the loss in training ---


def test_poses_reach_the_loss(tmp_path):
    clip = torch.linspace(-1, 1, 2 * 2 * 3 * 64).view(2, 2, 3, 8, 8)
    poses = Poses(torch.linspace(0, 7, 24).view(2, 2, 3, 2), torch.ones(2, 1, 5))
    batch = Batch(clip, torch.tensor([[1], [3]]), continues=False, poses=poses)
    data = SimpleNamespace(output_size=4, source=lambda split: Batches(batch), fingerprint=lambda: "of the videos")
    training = TrainingConfig(max_steps=1, tensorboard=False, accelerator="cpu")
    model = PIViTConfig(**SMALL | {"patch_size": 4, "n_layer": 1}, n_joints=3, d_skeleton=5)
    config = VideoConfig(path=str(tmp_path), n_frames=2, n_segments=1, image_size=8)
    experiment = Experiment(experiment="video-pi-vit", data=config, model=model, training=training)
    trainer = Trainer(experiment, RunFolder(tmp_path / "run"), lambda *_: None, open_data=lambda *_: data)
    loss, _, _ = trainer._loss(batch, 2, None)
    expected, _ = trainer.model.loss(batch.inputs, batch.targets, poses=batch.poses)
    torch.testing.assert_close(loss, expected.sum())
    before = trainer.model.joint_induction.joints.bias.clone()
    trainer._update()
    assert not torch.equal(trainer.model.joint_induction.joints.bias, before)


def test_poses_for_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.poses is .*; expected null but for PI-ViT"):
        Experiment(experiment="video-timesformer", data=VideoConfig(path=str(tmp_path), poses="poses"))


def test_names_of_classes_are_lines_of_a_file(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"name of a class is 'a\\nb'; expected letters, and no control characters"):
        find_task("motions").save_extras(SimpleNamespace(class_names=("a", "a\nb")), folder)
    assert not folder.path.exists()
