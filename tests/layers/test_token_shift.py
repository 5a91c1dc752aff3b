"""The token shift: padding may stand anywhere, and is not read."""

import torch

from recurra.layers.feed_forward import with_previous


def test_the_step_before_is_the_counted_one():
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    x = torch.arange(1.0, 17).view(4, 4, 1)
    before = torch.tensor([[-1.0], [-2.0], [-3.0], [-4.0]])
    now, previous, last = with_previous(x.masked_fill(~mask[..., None], torch.nan), before, mask)
    assert torch.equal(now[mask], x[mask])
    assert previous[mask].flatten().tolist() == [-1, 1, 2, 3, -2, 6, -3]
    assert last.flatten().tolist() == [4, 8, 9, -4]


def test_without_a_mask_every_step_counts():
    x, before = torch.randn(2, 5, 3).bfloat16(), torch.randn(2, 3)
    everything = torch.ones(2, 5, dtype=torch.bool)
    for one, other in zip(with_previous(x, before, None), with_previous(x, before, everything)):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
