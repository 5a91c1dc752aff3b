from typing import NamedTuple

import torch
from torch import Tensor, nn

from recurra.video.task import _classify_stream


class Total(NamedTuple):
    total: Tensor


class Sums(nn.Module):
    """A segment's logits are the pixels of all frames since the start of the stream, summed by colour."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.clips = []

    def forward(self, clip, state=None):
        self.clips.append(tuple(clip.shape))
        assert not self.training
        total = clip.sum((1, 3, 4)) + (0 if state is None else state.total)
        return (total * self.one)[:, None], Total(total)


def stream(n):
    random = torch.Generator().manual_seed(1)
    return [(0.5 * i, torch.randn(3, 2, 2, generator=random)) for i in range(n)]


def test_the_state_is_carried_and_the_last_frame_repeated():
    model, frames = Sums().train(), stream(7)
    said = list(_classify_stream(model, frames, n_frames=3, frame_seconds=0.5))
    assert [(s.start, s.end, s.n_repeated) for s in said] == [(0.0, 1.5, 0), (1.5, 3.0, 0), (3.0, 3.5, 2)]
    pixels = torch.stack([frame.sum((1, 2)) for _, frame in frames])
    logits = [pixels[:3].sum(0), pixels[:6].sum(0), pixels[:7].sum(0) + 2 * pixels[6]]
    for one, expected in zip(said, logits):
        torch.testing.assert_close(one.probabilities, expected.softmax(0), rtol=1e-5, atol=1e-6)
    assert model.clips == [(1, 3, 3, 2, 2)] * 3
    assert model.training


def test_it_says_what_it_knows_before_it_reads_on():
    read = []

    def frames():
        for frame in stream(6):
            read.append(frame)
            yield frame

    said = _classify_stream(Sums(), frames(), n_frames=2, frame_seconds=0.5)
    next(said)
    assert len(read) == 2
    next(said)
    assert len(read) == 4
