"""Streams of text that begin at another token in every epoch."""

import numpy as np
import pytest
import torch

from recurra.data.batches import DrawnLengths
from recurra.data.text import TextConfig
from recurra.data.text_batches import StreamSource

STEP = 20


def shifted_source(**options):
    defaults = {"batch_size": 4, "segment_length": STEP, "training": True, "shift_seed": 5}
    return StreamSource(np.arange(4 * 131), **{**defaults, **options})


def starts(source, epoch):
    return source.batch(epoch, 0).inputs[:, 0]


def test_all_streams_of_an_epoch_begin_later_by_the_same_draw():
    source, usual = shifted_source(), starts(shifted_source(shift_seed=None), 0)
    shifts = [starts(source, epoch) - starts(source, epoch)[0] for epoch in range(50)]
    assert all(torch.equal(shift, shifts[0]) for shift in shifts)
    drawn = {int(starts(source, epoch)[0]) for epoch in range(200)}
    assert drawn == set(range(STEP))
    assert int(usual[0]) == 0
    assert [int(starts(source, epoch)[0]) for epoch in range(9)] == [
        int(starts(shifted_source(), epoch)[0]) for epoch in range(9)
    ]
    assert [int(starts(source, epoch)[0]) for epoch in range(9)] != [
        int(starts(shifted_source(shift_seed=6), epoch)[0]) for epoch in range(9)
    ]


@pytest.mark.parametrize("drawn", [None, DrawnLengths(STEP, 3.0, 0.1, 0)])
def test_an_epoch_reads_on_from_its_start_and_stays_within_the_text(drawn):
    source = shifted_source(drawn=drawn)
    for epoch in range(30):
        batches = [source.batch(epoch, step) for step in range(len(source))]
        for row, first in enumerate(starts(source, epoch).tolist()):
            read = torch.cat([batch.inputs[row] for batch in batches])
            assert torch.equal(read, torch.arange(first, first + len(read)))
            targets = torch.cat([batch.targets[row] for batch in batches])
            assert torch.equal(targets, read + 1)
            assert int(targets[-1]) < 4 * 131


def test_ranks_shift_alike_and_evaluation_does_not_shift():
    parts = [shifted_source(rank=rank, world_size=2) for rank in range(2)]
    rows = torch.cat([part.batch(3, 1).inputs for part in parts])
    assert torch.equal(rows, shifted_source().batch(3, 1).inputs)
    scored = [shifted_source(training=False, shift_seed=seed) for seed in (5, None)]
    assert torch.equal(*(source.batch(0, 6).targets for source in scored))


def test_a_text_has_to_leave_room_for_the_longest_shift():
    StreamSource(np.arange(120), batch_size=2, segment_length=50, training=True)
    with pytest.raises(ValueError, match="the number of tokens in the text is 120; expected at least 150"):
        StreamSource(np.arange(120), batch_size=2, segment_length=50, training=True, shift_seed=0)
    shortest = StreamSource(np.arange(150), batch_size=2, segment_length=50, training=True, shift_seed=0)
    assert max(int(shortest.batch(epoch, 0).targets.max()) for epoch in range(300)) == 149


def test_a_config_asks_for_them(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b c d e f g h i\n" * 100)
    options = {"path": str(tmp_path), "cache": str(tmp_path / "cache"), "batch_size": 2, "segment_length": 7}
    usual, shifted = (
        TextConfig(**options, bptt_segments=2, shifted_epochs=wanted).build().source("train")
        for wanted in (False, True)
    )
    same = [torch.equal(usual.batch(n, 0).inputs, shifted.batch(n, 0).inputs) for n in range(20)]
    assert not all(same)
    with pytest.raises(ValueError, match=r"^data\.shifted_epochs is True; expected false unless data\.sampling is st"):
        TextConfig("corpus", shifted_epochs=True, sampling="windows")
