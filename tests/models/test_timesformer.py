"""TimeSformer: segments, initialisation, errors. tests/convert checks its equations."""

import pytest
import torch
from torch.nn import functional

from recurra.video.timesformer import TimeSformer, TimeSformerConfig, TimeSformerState

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def small(**options) -> TimeSformerConfig:
    sizes = {"n_classes": 5, "n_frames": 3, "image_size": 8, "patch_size": 4, "n_layer": 2, "d_model": 12}
    return TimeSformerConfig(**{**sizes, "n_heads": 3, "d_channel_mixing": 20, "drop_path": 0.0, **options})


def moved(model, by=0.2):
    """Move the weights away from their initial values, where biases, norms and some layers have no effect."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)
    return model


def make(**options) -> TimeSformer:
    return moved(TimeSformer(small(**options)).double())


def draw(batch=2, frames=6):
    return torch.randn(batch, frames, 3, 8, 8, dtype=torch.float64)


def test_every_segment_is_classified_by_itself():
    model, clip = make(), draw(2, 9)
    logits, state = model(clip)
    assert logits.shape == (2, 3, 5)
    assert state == TimeSformerState()
    for number, segment in enumerate(clip.split(3, 1)):
        alone, state = model(segment, state)
        torch.testing.assert_close(alone[:, 0], logits[:, number], **CLOSE)


def test_losses_are_those_of_every_segment():
    model, clip, targets = make(), draw(), torch.tensor([[1, -100], [4, 0]])
    losses, _ = model.loss(clip, targets)
    expected = functional.cross_entropy(model(clip)[0].flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    assert losses[0, 1] == 0.0


def test_a_new_divided_model_sees_frame_by_frame():
    model = TimeSformer(small())
    assert not any(block.time_projection.weight.any() for block in model.encoder.blocks)
    assert not any(block.time_projection.bias.any() for block in model.encoder.blocks)
    assert not model.encoder.times.any()
    clip = draw(2, 3).float()
    torch.testing.assert_close(model(clip)[0], model(clip[:, [2, 0, 1]])[0])


def test_weights_are_drawn_as_published():
    model = TimeSformer(small(d_model=96, n_layer=1))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all(), name
        elif name.endswith("bias") and "patches" not in name:
            assert not parameter.any(), name
        elif "time_projection" not in name and "patches" not in name and name != "encoder.times":
            assert 0.015 < parameter.std() < 0.025, name


def test_stochastic_depth_rises_from_0_to_drop_path():
    blocks = TimeSformer(small(n_layer=4, drop_path=0.3)).encoder.blocks
    assert [block.drop_path.p for block in blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert small(n_layer=1, drop_path=0.3).drop_paths == [0.0]


def test_stochastic_depth_drops_a_patch_position_a_frame_or_a_row():
    """As in the published code, where the layer after time attention follows the dropping."""
    block, seen = make().encoder.blocks[1], []

    class DropAll(torch.nn.Module):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return 0.0 * x

    block.drop_path = DropAll()
    x = torch.randn(2, 1 + 4 * 3, 12, dtype=torch.float64)
    y = block(x)
    assert seen == [(2 * 4, 3, 12), (2 * 3, 1 + 4, 12), (2, 1 + 4 * 3, 12)]
    assert torch.equal(y[:, 0], x[:, 0])
    assert torch.equal(y[:, 1:], x[:, 1:] + block.time_projection.bias)


def test_dropouts_are_for_training():
    for option in ("dropout", "attention_dropout", "drop_path", "head_dropout"):
        model, clip = make(**{option: 0.5}), draw()
        assert not torch.allclose(model(clip)[0], model(clip)[0]), option
        model.eval()
        assert torch.equal(model(clip)[0], model(clip)[0]), option


def test_every_parameter_gets_a_gradient():
    model = make()
    model(draw())[0].square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 3, 8, 8), r"clip is 4 frames long; expected one or more whole segments of n_frames = 3"),
        ((2, 3, 3, 8, 12), r"clip is float64 \(2, 3, 3, 8, 12\) on cpu; expected \(batch, frames, 3, 8, 8\)"),
    ],
)
def test_other_clips_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(shape, dtype=torch.float64))


def test_frames_as_a_decoder_gives_them_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"clip is uint8 .*; expected a floating-point type: normalise the frames"):
        make()(torch.zeros(2, 3, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"clip is a list; expected a torch\.Tensor"):
        make()([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, "n_heads is 5; expected a divisor of d_model = 12"),
        ({"patch_size": 3}, "patch_size is 3; expected a divisor of image_size = 8"),
        ({"n_frames": 0}, "n_frames is 0; expected at least 1"),
        ({"drop_path": 1.0}, "drop_path is 1.0; expected a probability"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
