"""The compact recurrent vision Transformer: its equations, its state, starting from TimeSformer, and its errors.

The oracle computes patch by patch and frame by frame, without batches, masks or rearranged axes.
"""

import copy

import pytest
import torch
from tests.gradients import require_same_gradients
from tests.models.test_timesformer import moved

from recurra.video.crvit import (
    CompactRecurrentViT,
    CompactRecurrentViTConfig,
    CompactRecurrentViTState,
    load_timesformer,
)
from recurra.video.timesformer import TimeSformer, TimeSformerConfig

SIZES = {"n_classes": 5, "n_frames": 3, "image_size": 8, "patch_size": 4, "n_layer": 2, "d_model": 12}
SHAPE = {**SIZES, "n_heads": 3, "d_channel_mixing": 20, "drop_path": 0.0}
FRAMES, EDGE, PATCHES = 3, 2, 4
KINDS = [("gru", "per_patch"), ("ncgru", "per_patch"), ("gru", "pooled"), ("ncgru", "pooled")]
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def make(cell="gru", memory="per_patch", **options) -> CompactRecurrentViT:
    config = CompactRecurrentViTConfig(**{**SHAPE, "cell": cell, "memory": memory, **options})
    return moved(CompactRecurrentViT(config).double())


def draw(batch=2, segments=3):
    return torch.randn(batch, segments * FRAMES, 3, 8, 8, dtype=torch.float64)


def attend(attention, asking, seen):
    """Softmax attention from some vectors to others, head by head."""
    weights, biases = attention.queries_keys_values.weight.chunk(3), attention.queries_keys_values.bias.chunk(3)
    queries = asking @ weights[0].T + biases[0]
    keys, values = (seen @ weights[part].T + biases[part] for part in (1, 2))
    size, heads = SIZES["d_model"] // attention.n_heads, []
    for head in range(attention.n_heads):
        at = slice(head * size, (head + 1) * size)
        heads.append((queries[:, at] @ keys[:, at].T / size**0.5).softmax(1) @ values[:, at])
    return attention.output_projection(torch.cat(heads, 1))


def by_the_equations(model, video):
    """The logits (S, n_classes) of one video, and its last memory."""
    config, past = model.config, None
    memory = [torch.zeros(config.d_model, dtype=torch.float64)] * (1 if config.memory == "pooled" else PATCHES)
    logits = []
    for segment in video.split(FRAMES):
        embedding = model.embedding
        class_token = embedding.class_token + embedding.positions[0] + (0.0 if past is None else past)
        z = torch.empty(PATCHES, FRAMES, config.d_model, dtype=torch.float64)
        for patch in range(PATCHES):
            top, left = 4 * (patch // EDGE), 4 * (patch % EDGE)
            pixels = segment[:, :, top : top + 4, left : left + 4].flatten(1)
            projection = embedding.patches.projection
            z[patch] = pixels @ projection.weight.flatten(1).T + projection.bias
            z[patch] += embedding.positions[1 + patch] + model.encoder.times
        for block in model.encoder.blocks:
            updates = []
            for patch in range(PATCHES):
                frames = block.norm_time(z[patch])
                recalled = [] if past is None else [block.norm_time(memory[patch % len(memory)])[None]]
                mixed = attend(block.time_attention, frames, torch.cat([*recalled, frames]))
                updates.append(block.time_projection(mixed))
            z = z + torch.stack(updates)
            of_class, of_patches = [], []
            for frame in range(FRAMES):
                tokens = block.norm_attention(torch.cat([class_token[None], z[:, frame]]))
                update = attend(block.attention, tokens, tokens)
                of_class.append(update[0])
                of_patches.append(update[1:])
            class_token = class_token + sum(of_class) / FRAMES
            z = z + torch.stack(of_patches, 1)
            class_token = class_token + block.feed_forward(block.norm_feed_forward(class_token)[None, None])[0, 0]
            z = z + block.feed_forward(block.norm_feed_forward(z))
        output, z = model.norm(class_token), model.norm(z)
        logits.append(model.head(torch.cat([output if past is None else past, output])))
        for frame in range(FRAMES):
            read = z[:, frame].mean(0, keepdim=True) if config.memory == "pooled" else z[:, frame]
            memory = [model.memory.rnn.cell(x[None], m[None])[0] for x, m in zip(read, memory)]
        past = output
    return torch.stack(logits), torch.stack(memory), past


@pytest.mark.parametrize(("cell", "memory"), KINDS)
def test_it_computes_the_equations(cell, memory):
    model, clip = make(cell, memory), draw()
    logits, state = model(clip)
    expected = [torch.stack(parts) for parts in zip(*(by_the_equations(model, video) for video in clip))]
    require_same_gradients((logits, state.memory, state.class_token), expected, [*model.parameters()], 1e-10)
    assert state.started.tolist() == [1.0, 1.0]


def test_streams_of_a_batch_may_be_at_different_points():
    model, clip = make(), draw(2, 2)
    first, second = clip.split(FRAMES, 1)
    whole, _ = model(clip)
    fresh, _ = model(second)
    _, state = model(first)
    mixed = CompactRecurrentViTState(*(torch.cat([torch.zeros_like(tensor[:1]), tensor[1:]]) for tensor in state))
    logits, after = model(second, mixed)
    torch.testing.assert_close(logits[0, 0], fresh[0, 0], **CLOSE)
    torch.testing.assert_close(logits[1, 0], whole[1, 1], **CLOSE)
    assert after.started.tolist() == [1.0, 1.0]


def test_a_new_model_trains():
    """The projections after time attention start as zeros, so gradients reach the memory after one update."""
    model = CompactRecurrentViT(CompactRecurrentViTConfig(**SHAPE)).double()
    clip, targets = draw(2, 2), torch.tensor([[0, 1], [2, 3]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(clip, targets)[0].mean().backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in model.parameters())


def timesformer(**options) -> TimeSformer:
    return moved(TimeSformer(TimeSformerConfig(**{**SHAPE, **options})).double())


@pytest.mark.parametrize(("cell", "memory"), KINDS)
def test_from_timesformer_the_first_segment_is_timesformer_s(cell, memory):
    trained, model, clip = timesformer(), make(cell, memory), draw(2, 2)
    rnn = copy.deepcopy(model.memory.state_dict())
    load_timesformer(model, trained.state_dict())
    assert all(torch.equal(tensor, rnn[name]) for name, tensor in model.memory.state_dict().items())
    found, expected = model(clip)[0], trained(clip)[0]
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found[:, 1], expected[:, 1])
    with torch.no_grad():
        trained.head.bias.add_(1.0)
    assert torch.equal(model(clip)[0], found)  # a copy


def test_weights_that_are_no_timesformer_s_are_refused_by_name():
    model, weights = make(), timesformer().state_dict()
    before = copy.deepcopy(model.state_dict())
    weights["encoder.gate"] = weights.pop("encoder.times")
    with pytest.raises(ValueError, match=r"encoder\.gate \(3, 12\), here missing, encoder\.times missing"):
        load_timesformer(model, weights)
    for wrong in (timesformer(n_classes=7).state_dict(), model.state_dict()):
        with pytest.raises(ValueError, match=r"state_dict is one of another model \(it has .*head\."):
            load_timesformer(model, wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("frames", [0, 2, 4])
def test_clips_of_broken_segments_are_refused(frames):
    with pytest.raises(ValueError, match=f"clip is {frames} frames long; expected one or more whole segments"):
        make()(draw()[:, :frames])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell": "lstm"}, "cell is 'lstm'; expected one of gru, ncgru"),
        ({"memory": "none"}, "memory is 'none'; expected one of per_patch, pooled"),
        ({"image_size": 10}, "patch_size is 4; expected a divisor of image_size = 10"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
