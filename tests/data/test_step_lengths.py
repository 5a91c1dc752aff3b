"""Training steps of drawn lengths: what an epoch reads, how the lengths are distributed, and the config of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.data._text_batches import DrawnLengths, StreamSource
from recurra.data.text import TextConfig


@given(
    total=st.integers(1, 4000),
    usual=st.integers(1, 90),
    deviation=st.floats(0.1, 40.0),
    half_share=st.floats(0.0, 0.9),
    epoch=st.integers(0, 3),
)
def test_every_epoch_reads_everything_in_the_same_number_of_steps(total, usual, deviation, half_share, epoch):
    lengths = DrawnLengths(usual, deviation, half_share, seed=0)
    borders = lengths.borders(total, epoch)
    assert (borders[0], borders[-1], len(borders)) == (0, total, lengths.n_steps(total) + 1)
    assert (np.diff(borders) >= 1).all()


def test_lengths_have_the_distribution_that_was_asked_for():
    drawn = np.diff(DrawnLengths(70, 5.0, 0.05, seed=0).borders(700_000, 0))
    halves = drawn < 52
    assert halves.mean() == pytest.approx(0.05, abs=0.01)
    for part, centre in ((drawn[~halves], 70), (drawn[halves], 35)):
        assert part.mean() == pytest.approx(centre, rel=0.02)
        assert part.std() == pytest.approx(5, rel=0.1)


def test_draws_follow_from_the_seed_and_the_epoch():
    lengths = DrawnLengths(70, 5.0, 0.05, seed=0)
    first = lengths.borders(7000, 0).tolist()
    assert lengths._replace(seed=0).borders(7000, 0).tolist() == first
    assert lengths.borders(7000, 1).tolist() != first
    assert lengths._replace(seed=1).borders(7000, 0).tolist() != first


def drawn_source(**options) -> StreamSource:
    sizes = {"batch_size": 4, "segment_length": 20, "drawn": DrawnLengths(20, 4.0, 0.1, seed=0), "training": True}
    return StreamSource(np.arange(4001), **{**sizes, **options})


def test_streams_of_drawn_steps_are_contiguous_and_whole():
    source = drawn_source()
    for epoch in (0, 1):
        batches = [source.batch(epoch, step) for step in range(len(source))]
        assert [batch.continues for batch in batches] == [False] + [True] * (len(source) - 1)
        inputs = torch.cat([batch.inputs for batch in batches], 1)
        assert torch.equal(inputs, torch.arange(4000).view(4, 1000))
        assert torch.equal(torch.cat([batch.targets for batch in batches], 1), inputs + 1)
        lengths = [batch.inputs.shape[1] for batch in batches]
        assert len(set(lengths)) > 5
        assert [source.relative_length(epoch, step) for step in range(len(source))] == [n / 20 for n in lengths]


def test_ranks_cut_at_the_same_places():
    whole = drawn_source()
    parts = [drawn_source(rank=rank, world_size=2) for rank in range(2)]
    for step in (0, 7):
        rows = torch.cat([part.batch(2, step).inputs for part in parts])
        assert torch.equal(rows, whole.batch(2, step).inputs)


def test_without_them_and_in_evaluation_steps_are_segments():
    for source in (drawn_source(drawn=None), drawn_source(training=False)):
        assert {source.batch(0, step).inputs.shape[1] for step in range(len(source))} == {20}
        assert source.relative_length(0, 3) == 1.0


def test_a_config_asks_for_them(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b c d e f g h i\n" * 100)
    options = {"path": str(tmp_path), "cache": str(tmp_path / "cache"), "batch_size": 2, "segment_length": 10}
    data = TextConfig(**options, bptt_segments=2, length_deviation=3.0, half_length_share=0.1).build()
    train, valid = data.source("train"), data.source("valid")
    lengths = {train.batch(0, step).inputs.shape[1] for step in range(len(train))}
    assert len(lengths) > 3
    assert 15 < np.median(sorted(lengths)) < 25
    assert valid.batch(0, 0).inputs.shape[1] == 10
