import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.data._text_batches import ExcerptSource, OverlappingSource, StreamSource
from recurra.data.batches import IGNORED_TARGET, BatchSource


def counting(n):
    """The text 0, 1, 2, ..., n-1."""
    tokens = np.arange(n).astype(np.uint16)
    tokens.flags.writeable = False
    return tokens


def streams(n, training, *, world_size=1, **options):
    """Its streams, on every rank."""
    shares = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    return [StreamSource(counting(n), training=training, **share, **options) for share in shares]


def rows_of_an_epoch(sources):
    """The rows of every rank, (rows, steps in all), inputs and targets."""
    inputs, targets = [], []
    for source in sources:
        batches = [source.batch(0, step) for step in range(len(source))]
        inputs.append(torch.cat([batch.inputs for batch in batches], dim=1))
        targets.append(torch.cat([batch.targets for batch in batches], dim=1))
    return torch.cat(inputs), torch.cat(targets)


@given(
    n=st.integers(2, 200),
    batch_size=st.integers(1, 9),
    segment_length=st.integers(1, 30),
    world_size=st.integers(1, 4),
)
def test_evaluation_predicts_every_token_once_in_order(n, batch_size, segment_length, world_size):
    sources = streams(n, False, batch_size=batch_size, segment_length=segment_length, world_size=world_size)
    inputs, targets = rows_of_an_epoch(sources)
    counted = targets != IGNORED_TARGET
    assert targets[counted].tolist() == list(range(1, n)), "rank after rank, row after row"
    assert torch.equal(inputs[counted] + 1, targets[counted])
    assert (inputs[~counted] == 0).all()
    assert (counted.long().diff(dim=1) <= 0).all(), "what is ignored lies at the end of a row"
    lengths = counted.sum(dim=1)[:batch_size]
    assert lengths.max() - lengths.min() <= 1
    assert {source.batch_size for source in sources} == {len(inputs) // world_size}


@given(
    batch_size=st.integers(1, 6),
    segment_length=st.integers(1, 20),
    world_size=st.integers(1, 3),
    extra=st.integers(0, 150),
)
def test_training_rows_are_contiguous_and_whole(batch_size, segment_length, world_size, extra):
    batch_size *= world_size
    n = batch_size * segment_length + 1 + extra
    sources = streams(n, True, batch_size=batch_size, segment_length=segment_length, world_size=world_size)
    inputs, targets = rows_of_an_epoch(sources)
    assert torch.equal(inputs + 1, targets)
    assert (inputs.diff(dim=1) == 1).all()
    assert inputs.shape[0] == batch_size
    assert inputs.shape[1] % segment_length == 0
    assert 0 <= (n - 1) // batch_size - inputs.shape[1] < segment_length, "no whole segment is left out"
    assert inputs.unique().numel() == inputs.numel(), "no token twice"


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match=r"is 12; expected at least 13, for one step with batch_size 3"):
        streams(12, True, batch_size=3, segment_length=4)
    assert len(streams(13, True, batch_size=3, segment_length=4)[0]) == 1
    with pytest.raises(ValueError, match="is 1; expected at least 2, to predict"):
        streams(1, False, batch_size=1, segment_length=4)
    with pytest.raises(ValueError, match=r"is 4; expected at least 5, for one excerpt"):
        excerpts(4)
    assert excerpts(5).batch(0, 0).inputs.tolist() == [[0, 1, 2, 3]] * 6


def excerpts(n, **options):
    return ExcerptSource(counting(n), **{"batch_size": 6, "segment_length": 4, "seed": 0, **options})


def test_excerpts_are_runs_of_the_text():
    source = excerpts(1000)
    assert isinstance(source, BatchSource)
    assert len(source) == 999 // 24
    for step in range(len(source)):
        batch = source.batch(0, step)
        assert batch.inputs.shape == (6, 4)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.is_contiguous()
        assert (batch.inputs.diff(dim=1) == 1).all()
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert not batch.continues


def test_a_batch_of_excerpts_depends_on_seed_epoch_step_and_rank_alone():
    source = excerpts(1000)
    places = [(epoch, step) for epoch in range(3) for step in range(4)]
    batches = [source.batch(*place).inputs for place in places]
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == len(places)
    for place, batch in reversed(list(zip(places, batches))):
        assert torch.equal(excerpts(1000).batch(*place).inputs, batch)
    assert not torch.equal(excerpts(1000, seed=1).batch(0, 0).inputs, batches[0])
    for place, batch in zip(places, batches):
        parts = [excerpts(1000, rank=rank, world_size=3) for rank in range(3)]
        assert torch.equal(torch.cat([part.batch(*place).inputs for part in parts]), batch)
        assert {(part.batch_size, len(part)) for part in parts} == {(2, len(source))}


def overlapping(n, *, world_size=1, **options):
    shares = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    return [OverlappingSource(counting(n), **share, **options) for share in shares]


@given(
    n=st.integers(2, 120),
    batch_size=st.integers(1, 7),
    stride=st.integers(1, 12),
    context=st.integers(0, 20),
    world_size=st.integers(1, 3),
)
def test_overlapping_windows_predict_every_token_once_after_their_context(n, batch_size, stride, context, world_size):
    sources = overlapping(n, batch_size=batch_size, stride=stride, context=context, world_size=world_size)
    predicted = []
    for step in range(len(sources[0])):
        batches = [source.batch(0, step) for source in sources]
        assert not any(batch.continues for batch in batches)
        for inputs, targets in zip(*(torch.cat([getattr(b, name) for b in batches]) for name in ("inputs", "targets"))):
            counted = targets != IGNORED_TARGET
            if not counted.any():
                assert (inputs == 0).all()
                continue
            first, last = int(counted.nonzero()[0]), int(counted.nonzero()[-1])
            assert counted[first : last + 1].all(), "what is predicted is one piece"
            assert torch.equal(inputs[: last + 1], inputs[0] + torch.arange(last + 1)), "what is read is one piece"
            assert torch.equal(targets[first : last + 1], inputs[first : last + 1] + 1)
            assert first == min(context, int(inputs[first])), "all of the context that there is"
            predicted += targets[first : last + 1].tolist()
    assert predicted == list(range(1, n)), "in order, window after window"
