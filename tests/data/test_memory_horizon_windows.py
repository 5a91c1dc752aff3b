"""Windows of Memory Horizon's sequences: sequences of their own, at places given by seed, epoch and step."""

import pytest
import torch

from recurra.data.memory_horizon import MemoryHorizonConfig, memory_horizon_targets

SIZES = {"sequence_length": 40, "n_samples": 60, "batch_size": 5, "eval_batch_size": 6}


def config(**options):
    given = {"window_lengths": [8, 20], "window_epochs": [2, 1], "window_tokens": 24} | options
    return MemoryHorizonConfig(**{**SIZES, **given})


@pytest.mark.parametrize(("epoch", "shape"), [(0, (15, 8)), (1, (15, 8)), (2, (5, 20)), (3, (5, 40)), (9, (5, 40))])
def test_phases_of_windows_and_then_whole_sequences(epoch, shape):
    batch = config().build().source("train").batch(epoch, 3)
    assert batch.inputs.shape == batch.targets.shape == shape
    assert not batch.continues


@pytest.mark.parametrize(("epoch", "n_windows"), [(0, 3), (2, 1)])
def test_a_window_is_a_part_of_its_sample_and_counts_from_its_start(epoch, n_windows):
    data, plain = config().build(), MemoryHorizonConfig(**SIZES).build()
    source, whole = data.source("train"), plain.source("train")
    starts = set()
    for step in range(len(source)):
        inputs, targets, *_ = source.batch(epoch, step)
        samples = whole.batch(epoch, step).inputs.repeat_interleave(n_windows, 0)
        for window, sample in zip(inputs, samples, strict=True):
            places = [i for i in range(41 - len(window)) if torch.equal(sample[i : i + len(window)], window)]
            assert places
            starts.add(places[0])
        assert torch.equal(targets, memory_horizon_targets(inputs))
    assert len(starts) > 10
    assert torch.equal(source.batch(3, 1).targets, whole.batch(3, 1).targets)


def test_windows_repeat_with_the_seed_and_change_with_the_epoch():
    inputs = config().build().source("train").batch(0, 1).inputs
    assert torch.equal(inputs, config().build().source("train").batch(0, 1).inputs)
    assert not torch.equal(inputs, config().build().source("train").batch(1, 1).inputs)


def test_ranks_share_the_windows_of_one():
    whole = config(batch_size=6).build().source("train").batch(0, 1)
    for world_size in (2, 3):
        parts = [config(batch_size=6).build(rank=r, world_size=world_size).source("train") for r in range(world_size)]
        batches = [source.batch(0, 1) for source in parts]
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), whole.inputs)
        assert torch.equal(torch.cat([batch.targets for batch in batches]), whole.targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_lengths": [8, 41]}, r"data\.window_lengths\[1\] is 41; expected 1 to data\.sequence_length = 40"),
        ({"window_lengths": [8]}, r"data\.window_epochs is \[2, 1\]; expected as many as data\.w.*, 1"),
        ({"window_lengths": [], "window_epochs": []}, r"data\.window_tokens is 24; expected 512 without"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)
