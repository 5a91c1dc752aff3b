import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.data.batches import IGNORED_TARGET
from recurra.data.memory_horizon import MemoryHorizonConfig, _SampleSource, memory_horizon_targets, memory_spans

SMALL = {
    "sequence_length": 12,
    "resets_per_sample": 2,
    "n_samples": 50,
    "batch_size": 8,
    "eval_batch_size": 4,
}


def numbered_source(n, **options):
    """A source whose sample i is the sequence [i], so that a batch shows which samples it took."""
    samples = torch.arange(n)[:, None]
    return _SampleSource(samples, samples.clone(), **options)


def taken(batch):
    """The samples of a batch that count."""
    inputs, targets = batch.inputs.flatten(), batch.targets.flatten()
    assert torch.equal(inputs[targets != IGNORED_TARGET], targets[targets != IGNORED_TARGET])
    return targets[targets != IGNORED_TARGET].tolist()


def test_the_defaults_are_the_papers():
    config = MemoryHorizonConfig()
    assert (config.sequence_length, config.resets_per_sample, config.n_samples) == (1024, 3, 2000)
    data = config.build()
    assert (data.vocab_size, data.output_size, data.reset_token) == (6, 51, 5)
    rows = [len(data.tokens[data.places(split)]) for split in ("train", "valid", "test")]
    assert rows == [1600, 200, 200]
    assert len(data.source("train")) == 50
    batch = data.source("train").batch(0, 49)
    assert batch.inputs.shape == batch.targets.shape == (32, 1024)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert not batch.continues


def test_tokens_targets_and_spans_belong_together():
    data = MemoryHorizonConfig(**SMALL, largest_number=7, modulus=13).build()
    assert torch.equal(data.targets, memory_horizon_targets(data.tokens, reset_token=8, modulus=13))
    assert data.tokens.max() == 8
    assert (data.vocab_size, data.output_size) == (9, 13)
    together = torch.cat([data.spans(split) for split in ("train", "valid", "test")])
    assert torch.equal(together, memory_spans(data.tokens, reset_token=8))
    batch = data.source("test").batch(0, 0)
    assert torch.equal(batch.inputs, data.tokens[45:49])
    assert torch.equal(batch.targets, data.targets[45:49])


def test_the_seed_decides_and_the_rank_does_not():
    first, again = (MemoryHorizonConfig(**SMALL, seed=3).build(rank=r, world_size=2) for r in (0, 1))
    other = MemoryHorizonConfig(**SMALL, seed=4).build()
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


@given(n=st.integers(1, 40), batch_size=st.integers(1, 12), world_size=st.integers(1, 4), training=st.booleans())
def test_the_ranks_share_an_epoch(n, batch_size, world_size, training):
    if training:
        batch_size *= world_size
    options = {"batch_size": batch_size, "world_size": world_size, "seed": 7 if training else None}
    sources = [numbered_source(n, rank=rank, **options) for rank in range(world_size)]
    assert len({len(source) for source in sources}) == 1
    seen = []
    for step in range(len(sources[0])):
        batches = [source.batch(2, step) for source in sources]
        assert len({len(batch.inputs) for batch in batches}) == 1, "every rank has as many rows"
        assert all(0 < len(batch.inputs) <= source.batch_size for batch, source in zip(batches, sources))
        if training:
            assert all((batch.targets != IGNORED_TARGET).all() for batch in batches)
        seen += [sample for batch in batches for sample in taken(batch)]
    assert len(seen) == len(set(seen)), "no sample twice"
    if training:
        assert n - len(seen) < world_size
    else:
        assert seen == list(range(n))


def test_training_takes_a_new_order_each_epoch_and_keeps_the_last_batch():
    source = numbered_source(20, batch_size=8, seed=0)
    assert [len(source.batch(0, step).inputs) for step in range(len(source))] == [8, 8, 4]
    epochs = [[sample for step in range(3) for sample in taken(source.batch(epoch, step))] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(20))


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("sequence_length", 0, ValueError),
        ("largest_number", -1, ValueError),
        ("resets_per_sample", -1, ValueError),
        ("resets_per_sample", 13, ValueError),
        ("modulus", 0, ValueError),
        ("n_samples", 9, ValueError),
        ("batch_size", 0, ValueError),
        ("eval_batch_size", 0, ValueError),
        ("seed", -1, ValueError),
        ("batch_size", 2.5, TypeError),
        ("n_samples", True, TypeError),
        ("seed", "0", TypeError),
    ],
)
def test_bad_fields_are_named(field, value, error):
    with pytest.raises(error, match=rf"^data\.{field} is {value!r}.*; expected "):
        MemoryHorizonConfig(**{**SMALL, field: value})


@pytest.mark.usefixtures("no_type_checker")
def test_bad_ranks_splits_and_steps_are_refused():
    config = MemoryHorizonConfig(**SMALL)
    with pytest.raises(ValueError, match=r"^rank is 2; expected a rank below world_size = 2"):
        config.build(rank=2, world_size=2)
    with pytest.raises(ValueError, match="world_size is 0; expected at least 1"):
        config.build(rank=0, world_size=0)
    with pytest.raises(ValueError, match=r"data\.batch_size is 8; expected a multiple of world_size = 3"):
        config.build(rank=0, world_size=3)
    data = config.build()
    with pytest.raises(ValueError, match="split is 'dev'; expected one of train, valid, test"):
        data.source("dev")
    source = data.source("train")
    for step in (-1, len(source)):
        with pytest.raises(IndexError, match=f"step is {step}; expected a step of the epoch, 0 to 4"):
            source.batch(0, step)
    with pytest.raises(ValueError, match="epoch is -1; expected at least 0"):
        source.batch(-1, 0)
