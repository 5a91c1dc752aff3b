"""A video as a stream: a model reads segment after segment, and only its state is carried over."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.evaluation.evaluate import evaluation_mode


class SegmentPrediction(NamedTuple):
    """A model's prediction after a segment.

    start, end: of the segment, in seconds; its last frame lasts until `end`.
    probabilities: of each class, given this segment and the state carried from earlier ones; on the CPU.
    n_repeated: how many times the last frame was repeated to fill a segment cut short by the end of the stream.
    """

    start: float
    end: float
    probabilities: Float[Tensor, " C"]
    n_repeated: int


def classify_stream(
    model: nn.Module, frames: Iterable[tuple[float, Tensor]], *, n_frames: int, frame_seconds: float
) -> Iterator[SegmentPrediction]:
    """Read frames as they arrive and yield a prediction after each segment.

    Memory holds the frames of one segment and the model's state, however long the stream is.

    Args:
        model: called as `model(clip, state) -> (logits, state)`, clip (1, n_frames, C, H, W), logits (1, 1, classes).
        frames: (time in seconds, normalised frame (C, H, W)), in order.
        n_frames: frames in a segment.
        frame_seconds: the duration of a frame.

    Raises:
        ValueError: there are no frames.
    """
    device = next(model.parameters()).device
    state: Any = None
    segment: list[Tensor] = []
    start = time = 0.0
    n_segments = 0

    def predict(n_repeated: int) -> SegmentPrediction:
        nonlocal state
        clip = torch.stack(segment + segment[-1:] * n_repeated)[None].to(device)
        with evaluation_mode(model), torch.inference_mode():
            logits, state = model(clip, state)
        return SegmentPrediction(start, time + frame_seconds, logits[0, -1].float().softmax(-1).cpu(), n_repeated)

    for time, frame in frames:
        start = start if segment else time
        segment.append(frame)
        if len(segment) == n_frames:
            yield predict(0)
            segment, n_segments = [], n_segments + 1
    if segment:
        yield predict(n_frames - len(segment))
    elif not n_segments:
        raise ValueError(sentence("frames", "empty", "at least one frame to classify"))
