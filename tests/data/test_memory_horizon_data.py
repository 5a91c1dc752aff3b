import pytest
import torch

from recurra.data.batches import IGNORED_TARGET
from recurra.data.memory_horizon import MemoryHorizonConfig, memory_horizon_targets, memory_spans

SMALL = {
    "sequence_length": 12,
    "resets_per_sample": 2,
    "n_samples": 50,
    "batch_size": 8,
    "eval_batch_size": 4,
}


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


def test_a_rank_that_is_short_of_a_sequence_gets_one_that_does_not_count():
    config = MemoryHorizonConfig(**SMALL)  # 5 sequences for validation, 4 in a step
    batches = [config.build(rank=rank, world_size=2).source("valid").batch(0, 1) for rank in (0, 1)]
    counted = [(batch.targets != IGNORED_TARGET).all(1).tolist() for batch in batches]
    assert counted == [[True], [False]]


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("resets_per_sample", 13, ValueError), ("n_samples", 9, ValueError), ("batch_size", 2.5, TypeError)],
)
def test_bad_fields_are_named(field, value, error):
    with pytest.raises(error, match=rf"^data\.{field} is {value!r}.*; expected "):
        MemoryHorizonConfig(**{**SMALL, field: value})


@pytest.mark.usefixtures("no_type_checker")
def test_bad_ranks_splits_and_steps_are_refused():
    config = MemoryHorizonConfig(**SMALL)
    with pytest.raises(ValueError, match=r"^rank is 2; expected a rank below world_size = 2"):
        config.build(rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"data\.batch_size is 8; expected a multiple of world_size = 3"):
        config.build(rank=0, world_size=3)
    data = config.build()
    with pytest.raises(ValueError, match="split is 'dev'; expected one of train, valid, test"):
        data.source("dev")
    with pytest.raises(IndexError, match="step is 5; expected a step of the epoch, 0 to 4"):
        data.source("train").batch(0, 5)
