import numpy as np
import pytest
import torch

from recurra.video.clips import evaluation_crops, resize_short_side, training_clip


def ramp(height, width, n=3):
    """Frames whose channels are the row, the column and the number of the frame."""
    frames = torch.zeros(n, 3, height, width, dtype=torch.uint8)
    frames[:, 0] = torch.arange(height)[:, None]
    frames[:, 1] = torch.arange(width)
    frames[:, 2] = torch.arange(n)[:, None, None]
    return frames


def undone(clip):
    return ((clip * 0.225 + 0.45) * 255).round().int()


@pytest.mark.parametrize(("height", "width", "size"), [(30, 45, (20, 30)), (45, 30, (30, 20)), (31, 47, (20, 30))])
def test_the_shorter_side_is_scaled(height, width, size):
    assert resize_short_side(torch.zeros(1, 3, height, width), 20).shape[-2:] == size


def test_training_clips():
    frames = ramp(24, 40)
    seen = set()
    for seed in range(400):
        random = np.random.default_rng(seed)
        clip = training_clip(frames, random, image_size=21, scale_jitter=(24, 24), flip=True)
        assert clip.shape == (3, 3, 21, 21)
        assert clip.dtype == torch.float32
        rows, columns, numbers = undone(clip).unbind(1)
        assert (rows == rows[:1]).all()  # one draw for all frames
        assert (columns == columns[:1]).all()
        assert (numbers == torch.arange(3)[:, None, None]).all()
        step = int(columns[0, 0, 1] - columns[0, 0, 0])
        assert (columns[0].diff(dim=1) == step).all()
        assert (rows[0].diff(dim=0) == 1).all()
        seen.add((int(rows[0, 0, 0]), int(columns[0].min()), step))
    assert {row for row, _, _ in seen} == set(range(4))
    assert {column for _, column, _ in seen} == set(range(20))
    assert {step for _, _, step in seen} == {1, -1}


def test_the_scale_is_drawn():
    """A frame scaled by s has columns 1/s apart."""
    frames = ramp(20, 20)
    scales = set()
    for seed in range(200):
        clip = training_clip(frames, np.random.default_rng(seed), image_size=20, scale_jitter=(20, 23), flip=False)
        columns = (clip[0, 1] * 0.225 + 0.45) * 255
        scales.add(round(20 / float(columns[0, 8:12].diff().mean())))
    assert scales == {20, 21, 22, 23}


@pytest.mark.parametrize("upright", [False, True])
def test_evaluation_crops(upright):
    frames = ramp(41, 20) if upright else ramp(20, 41)
    channel = 0 if upright else 1
    crops = undone(evaluation_crops(frames, image_size=20, n_crops=3))
    assert crops.shape == (3, 3, 3, 20, 20)
    assert [int(crop[0, channel].min()) for crop in crops] == [0, 10, 21]
    middle = undone(evaluation_crops(frames, image_size=20))
    assert torch.equal(middle[0], crops[1])
    assert torch.equal(middle[0, :, 1 - channel], frames.int()[:, 1 - channel, :20, :20])
