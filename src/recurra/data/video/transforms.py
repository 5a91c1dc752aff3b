"""From frames to the clip that a model sees: scale, crop, flip, normalise. All frames of a clip share one draw."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

MEAN = 0.45
"""Subtracted from each channel of a picture in [0, 1] (TimeSformer's value)."""
STD = 0.225
"""Each channel is then divided by this (TimeSformer's value)."""


def normalise(frames: Tensor) -> Float[Tensor, "*shape"]:
    """Turn pictures of whole numbers 0..255 into float32: subtract `MEAN` and divide by `STD`."""
    return (frames.float() / 255 - MEAN) / STD


def resize_short_side(frames: Float[Tensor, "T C H W"], short_side: int) -> Float[Tensor, "T C h w"]:
    """Scale pictures bilinearly, so that the shorter side has `short_side` pixels; the aspect ratio stays the same."""
    size = scaled_size(frames.shape[-2], frames.shape[-1], short_side)
    if size == tuple(frames.shape[-2:]):
        return frames
    return interpolate(frames, size=size, mode="bilinear", align_corners=False)


def scaled_size(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Return the height and width of a picture whose shorter side is scaled to `short_side` pixels."""
    factor = short_side / min(height, width)
    return max(short_side, round(height * factor)), max(short_side, round(width * factor))


class TrainingView(NamedTuple):
    """What a training clip shows of its frames: a square of the scaled pictures, perhaps mirrored.

    size: height and width of the scaled pictures. top, left: of the square. image_size: pixels on its side.
    """

    size: tuple[int, int]
    top: int
    left: int
    image_size: int
    mirrored: bool

    def places(self, places: Float[Tensor, "*shape 2"], height: int, width: int) -> Float[Tensor, "*shape 2"]:
        """Return where places (x, y) in pixels of pictures of this height and width are in the clip."""
        scale = places.new_tensor((self.size[1] / width, self.size[0] / height))
        moved = places * scale - places.new_tensor((self.left, self.top))
        return torch.stack([self.image_size - moved[..., 0], moved[..., 1]], -1) if self.mirrored else moved


def draw_view(
    random: np.random.Generator,
    height: int,
    width: int,
    *,
    image_size: int,
    scale_jitter: tuple[int, int],
    flip: bool,
) -> TrainingView:
    """Draw the view of a training clip of pictures of this height and width; see `training_clip`."""
    short_side = int(random.integers(scale_jitter[0], scale_jitter[1] + 1))
    places, mirrored = random.random(2), random.random() < 0.5
    size = scaled_size(height, width, short_side)
    top, left = (int(place * (side - image_size + 1)) for place, side in zip(places, size))
    return TrainingView(size, top, left, image_size, bool(flip and mirrored))


def training_clip(
    frames: UInt8[Tensor, "T C H W"],
    random: np.random.Generator,
    *,
    image_size: int,
    scale_jitter: tuple[int, int],
    flip: bool,
) -> Float[Tensor, "T C S S"]:
    """Make a random normalised view of a clip: TimeSformer's training transform.

    Scales the shorter side to a number of pixels drawn uniformly from `scale_jitter` (both ends included), cuts a
    square of `image_size` at a random place, and with `flip` mirrors half of the clips left to right.
    """
    height, width = frames.shape[-2:]
    view = draw_view(random, height, width, image_size=image_size, scale_jitter=scale_jitter, flip=flip)
    scaled = resize_short_side(frames.float(), min(view.size))
    cut = scaled[..., view.top : view.top + image_size, view.left : view.left + image_size]
    return normalise(cut.flip(-1) if view.mirrored else cut).contiguous()


def evaluation_crops(
    frames: UInt8[Tensor, "T C H W"], *, image_size: int, n_crops: int = 1
) -> Float[Tensor, "n_crops T C S S"]:
    """Make fixed normalised views of a clip: scale the shorter side to `image_size`, then cut squares along the longer.

    n_crops: 1 cuts the middle; more are spaced evenly from the left (or top) end to the right (or bottom).
    """
    scaled = resize_short_side(frames.float(), image_size)
    space = [side - image_size for side in scaled.shape[-2:]]
    crops = []
    for crop in range(n_crops):
        where = crop / (n_crops - 1) if n_crops > 1 else 0.5
        top, left = (round(where * side) for side in space)
        crops.append(scaled[..., top : top + image_size, left : left + image_size])
    return normalise(torch.stack(crops))
