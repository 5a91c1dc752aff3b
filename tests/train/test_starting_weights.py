import pytest
import torch
from tests.train.payloads import payload
from torch import nn

from recurra.train.checkpoint import _save_checkpoint
from recurra.train.experiment import Experiment
from recurra.video._published import start_from
from recurra.video.crvit import CompactRecurrentViT, CompactRecurrentViTConfig
from recurra.video.pi_vit import PIViT, PIViTConfig
from recurra.video.timesformer import TimeSformer, TimeSformerConfig

SMALL = {"patch_size": 4, "n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 12}
DATA = {"n_classes": 3, "n_frames": 2, "image_size": 8}


def timesformer(seed=0, **changes) -> TimeSformer:
    return _drawn(TimeSformer(TimeSformerConfig(**{**SMALL, **DATA, **changes})), seed)


def crvit(seed=0, **changes) -> CompactRecurrentViT:
    return _drawn(CompactRecurrentViT(CompactRecurrentViTConfig(**{**SMALL, **DATA, **changes})), seed)


def _drawn(model: nn.Module, seed: int) -> nn.Module:
    """All weights drawn, the zeros among them, too."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return model.eval()


def saved(model: nn.Module, path, **config):
    config = {"experiment": "video", "model": {"n_heads": model.config.n_heads, **config}}
    _save_checkpoint(path, payload(config=config, model=model.state_dict()))
    return str(path)


def clip(n_frames=2, image_size=8):
    return torch.randn(2, n_frames, 3, image_size, image_size, generator=torch.Generator().manual_seed(5))


def test_a_checkpoint_of_the_same_model_gives_its_logits(tmp_path):
    trained, fresh = crvit(1), crvit(2)
    said = start_from(fresh, saved(trained, tmp_path / "best.safetensors"))
    assert said == f"starts from {tmp_path / 'best.safetensors'}, step 7"
    both = torch.cat([clip(), -clip()], 1)
    torch.testing.assert_close(fresh(both)[0], trained(both)[0], rtol=0, atol=0)


def test_a_crvit_starts_with_the_timesformers_logits(tmp_path):
    trained, fresh = timesformer(1), crvit(2)
    memory = {name: tensor.clone() for name, tensor in fresh.memory.state_dict().items()}
    start_from(fresh, saved(trained, tmp_path / "best.safetensors"))
    torch.testing.assert_close(fresh(clip())[0], trained(clip())[0], rtol=1e-5, atol=1e-6)
    for name, tensor in fresh.memory.state_dict().items():
        assert torch.equal(tensor, memory[name])


def test_embeddings_of_other_sizes_are_interpolated(tmp_path):
    trained, fresh = timesformer(1, image_size=8, n_frames=2), crvit(2, image_size=16, n_frames=4)
    start_from(fresh, saved(trained, tmp_path / "best.safetensors"))
    old, new = trained.embedding.positions, fresh.embedding.positions
    assert torch.equal(new[0], old[0])
    for row in range(4):
        for column in range(4):
            assert torch.equal(new[1 + 4 * row + column], old[1 + 2 * (row // 2) + column // 2])
    assert torch.equal(fresh.encoder.times, trained.encoder.times[[0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        (lambda: timesformer(n_heads=4), "is a model with model.n_heads 4; expected one with model.n_heads 2"),
        (lambda: timesformer(d_channel_mixing=10), r"another model \(it has encoder\.blocks\.0\.feed_forward"),
        (lambda: nn.Linear(2, 3), "is a checkpoint of a video run; expected one of a video model"),
    ],
)
def test_weights_of_other_models_are_refused(trained, message, tmp_path):
    model = trained()
    model.config = getattr(model, "config", TimeSformerConfig(**SMALL, **DATA))
    fresh = timesformer(2)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        start_from(fresh, saved(model, tmp_path / "best.safetensors"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


def test_pi_vit_counts_as_a_timesformer_and_keeps_its_own_modules(tmp_path):
    def pi_vit(seed):
        return _drawn(PIViT(PIViTConfig(**SMALL, **DATA, n_joints=3, d_skeleton=5)), seed)

    trained, fresh = pi_vit(1), pi_vit(2)
    own = fresh.joint_induction.narrow.weight.clone()
    for source, target in ((trained, timesformer(3)), (trained, fresh), (timesformer(4), fresh)):
        start_from(target, saved(source, tmp_path / "best.safetensors"))
        assert torch.equal(target(clip())[0], source(clip())[0])
    assert torch.equal(fresh.joint_induction.narrow.weight, own)
    start_from(crvit(5), saved(trained, tmp_path / "best.safetensors"))


def test_a_task_without_such_weights_says_so():
    with pytest.raises(ValueError, match="init_from is here; expected null: runs of memory-horizon start from fresh"):
        Experiment(experiment="memory-horizon", init_from="here").load_initial_weights(nn.Identity())
