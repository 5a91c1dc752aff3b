"""The tasks: their targets against an evaluation of their own, and what a source of drawn batches promises."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.data.batches import IGNORED_TARGET, BatchSource, LevelledSource, TokenDataSet
from recurra.train.tasks.generated import _DrawnSource, _Lengths
from recurra.train.tasks.problems import (
    _STATE_TRACKING,
    CLOSE,
    EQUALS,
    OPEN,
    InductionConfig,
    RecallConfig,
    StateTrackingConfig,
    _associative_recall,
    _bracketed_arithmetic,
    _group_words,
    _induction,
    _modular_arithmetic,
    _multiplication_table,
    _parity,
)

SIGNS = "01234+-*()="
lengths = st.integers(2, 60)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(length=st.integers(1, 40))
def test_parity(length):
    tokens, targets = _parity(rng(), 30, length)
    assert tokens.shape == (30, length)
    assert targets.tolist() == [row.count(1) % 2 for row in tokens.tolist()]


@given(length=lengths, seed=st.integers(0, 99))
def test_arithmetic_is_python_s(length, seed):
    tokens, targets = _modular_arithmetic(rng(seed), 8, length)
    assert tokens.shape == (8, length // 2 * 2)
    check_expressions(tokens, targets)
    assert not np.isin(tokens, (OPEN, CLOSE)).any()


@given(length=lengths, seed=st.integers(0, 99))
def test_arithmetic_with_brackets_is_python_s(length, seed):
    tokens, targets = _bracketed_arithmetic(rng(seed), 8, length)
    assert tokens.shape == (8, length)
    check_expressions(tokens, targets)


def check_expressions(tokens: np.ndarray, targets: np.ndarray) -> None:
    assert (tokens[:, -1] == EQUALS).all()
    for row, target in zip(tokens[:, :-1].tolist(), targets.tolist()):
        expression = "".join(SIGNS[token] for token in row)
        assert eval(expression) % 5 == target, expression


@pytest.mark.parametrize(("group", "order"), [("s3", 6), ("a5", 60), ("s5", 120)])
def test_products_of_a_group_are_compositions(group, order):
    words, products = _group_words(rng(), 5, 12, group=group)
    n_letters = 3 if group == "s3" else 5
    elements = list(permutations(range(n_letters)))
    if group == "a5":  # a permutation is even if its matrix has determinant 1
        elements = [p for p in elements if np.linalg.det(np.eye(5)[list(p)]) > 0]
    assert len(elements) == len(_multiplication_table(group)) == order
    for word, product in zip(words.tolist(), products.tolist()):
        letters = list(range(n_letters))
        for element, number in zip(word, product):
            letters = [elements[element][letter] for letter in letters]
            assert elements[number] == tuple(letters)


@given(n_pairs=st.integers(1, 8), length=st.sampled_from([32, 48, 64]))
def test_recall_asks_every_key_once_for_its_value(n_pairs, length):
    tokens, targets = _associative_recall(rng(), 6, length, n_pairs=n_pairs, vocab_size=40)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        pairs = dict(zip(row[: 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2]))
        assert len(pairs) == n_pairs
        assert all(1 <= key < 20 <= value < 40 for key, value in pairs.items())
        asked = {place: value for place, value in enumerate(wanted) if value != -1}
        assert all(place >= 2 * n_pairs and place % 2 == 0 for place in asked)
        assert {row[place]: value for place, value in asked.items()} == pairs
        assert len(asked) == n_pairs


def test_places_between_pairs_and_queries_may_be_blank():
    tokens, targets = _associative_recall(rng(), 6, 32, n_pairs=4, vocab_size=40)
    blank, same = _associative_recall(rng(), 6, 32, n_pairs=4, vocab_size=40, random_filler=False)
    np.testing.assert_array_equal(targets, same)
    counts = (targets != -1) | (np.arange(32) < 8)
    np.testing.assert_array_equal(blank, np.where(counts, tokens, 0))
    assert tokens[~counts].any()
    assert (RecallConfig(random_filler=False).build().source("train").batch(0, 0).inputs == 0).any(1).all()


@given(length=st.integers(3, 30))
def test_induction_asks_what_followed(length):
    tokens, targets = _induction(rng(), 20, length, vocab_size=5)
    for row, target in zip(tokens.tolist(), targets.tolist()):
        assert row.count(5) == 2
        assert row[-1] == 5
        assert row[row.index(5) + 1] == target < 5


@pytest.mark.parametrize(
    "config",
    [
        *(StateTrackingConfig(task=name, eval_max_length=60) for name in _STATE_TRACKING),
        RecallConfig(vocabulary=41, eval_batch_size=64),
        InductionConfig(min_length=30, eval_min_length=30, eval_max_length=30, max_length=30),
    ],
)
def test_every_task_is_a_data_set(config):
    """With as many answers as a guess chooses from."""
    data = config.build()
    assert isinstance(data, TokenDataSet)
    source = data.source("valid")
    seen = torch.cat([source.batch(0, step).targets.flatten() for step in range(len(source))]).unique()
    assert len(seen[seen != IGNORED_TARGET]) == data.n_answers
    for split in ("train", "valid", "test"):
        source = data.source(split)
        assert isinstance(source, BatchSource)
        batch = source.batch(0, len(source) - 1)
        counted = batch.targets != IGNORED_TARGET
        assert not batch.continues
        assert counted.any(1).all()
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < data.vocab_size
        assert 0 <= int(batch.targets[counted].min()) <= int(batch.targets[counted].max()) < data.output_size
        low, high = ("min_length", "max_length") if split == "train" else ("eval_min_length", "eval_max_length")
        assert getattr(config, low) - 1 <= batch.inputs.shape[1] <= getattr(config, high)


def test_drawn_batches_follow_from_their_place():
    data = StateTrackingConfig().build()
    train, valid, test = (data.source(split) for split in ("train", "valid", "test"))
    assert torch.equal(train.batch(2, 7).inputs, StateTrackingConfig().build().source("train").batch(2, 7).inputs)
    firsts = [train.batch(0, 0), train.batch(0, 1), train.batch(1, 0), valid.batch(0, 0), test.batch(0, 0)]
    firsts.append(StateTrackingConfig(seed=1).build().source("train").batch(0, 0))
    contents = {(tuple(batch.inputs.shape), tuple(batch.inputs.flatten().tolist()[:60])) for batch in firsts}
    assert len(contents) == len(firsts)


@pytest.mark.parametrize("piece", [1, 7, 10, 31])
def test_pieces_are_the_sequences(piece):
    sizes = {"eval_min_length": 30, "eval_max_length": 30, "eval_steps": 3, "eval_batch_size": 4}
    whole, pieces = (InductionConfig(**sizes, eval_piece=size).build().source("test") for size in (None, piece))
    per_sequence = -(-30 // piece)
    assert len(pieces) == 3 * per_sequence
    for number in range(3):
        parts = [pieces.batch(0, number * per_sequence + place) for place in range(per_sequence)]
        assert [part.continues for part in parts] == [False] + [True] * (per_sequence - 1)
        assert all(part.inputs.shape[1] <= piece for part in parts)
        assert torch.equal(torch.cat([part.inputs for part in parts], 1), whole.batch(0, number).inputs)
        assert torch.equal(torch.cat([part.targets for part in parts], 1), whole.batch(0, number).targets)


def test_ranks_share_a_batch():
    config = StateTrackingConfig(batch_size=6)
    whole = config.build().source("train").batch(0, 3)
    parts = [config.build(rank=rank, world_size=2).source("train").batch(0, 3) for rank in range(2)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_the_curriculum_grows_with_every_step_to_its_end():
    grows = _Lengths(shortest=3, longest=40, final=160, growth=4)
    assert [grows.range(place) for place in (0.0, 1.0, 4.0, 9.0)] == [(3, 40), (3, 70), (3, 160), (3, 160)]
    assert _Lengths(3, 40, 40, 0).range(5.0) == (3, 40)
    assert _Lengths(3, 60, 160, 100).range(29.0) == (3, 89)  # 0.29 * 100 is a little less than 29
    doubles = _Lengths(3, 10, 160, 4, "geometric")
    assert [doubles.range(place)[1] for place in (0.0, 1.0, 2.0, 3.0, 4.0, 9.0)] == [10, 20, 40, 80, 160, 160]
    assert _Lengths(3, 10, 10_000, 3, "geometric").range(1.0) == (3, 100)  # 10 * 1000 ** (1 / 3) is a little less
    waits = _Lengths(3, 40, 160, 4, hold=2)
    assert [waits.range(place)[1] for place in (0.0, 2.0, 3.0, 6.0, 9.0)] == [40, 40, 70, 160, 160]
    assert _Lengths(3, 40, 40, 0, "geometric").range(5.0) == (3, 40)
    asked = []

    def draw(random, batch_size, length):
        asked.append(length)
        return np.zeros((batch_size, length), dtype=np.int64), np.zeros(batch_size, dtype=np.int64)

    source = _DrawnSource(draw, _Lengths(3, 5, 9, 2), split="train", n_batches=200, batch_size=1, seed=0)
    longest = []
    for epoch in range(4):
        asked.clear()
        for step in range(200):
            source.batch(epoch, step)
        assert min(asked) == 3
        longest.append(max(asked))
    assert longest == [6, 8, 9, 9] or longest == [7, 9, 9, 9]


def test_levels_are_the_steps_of_a_growth_that_waits():
    grows = {"max_length": 5, "final_length": 80, "growth_epochs": 4, "growth": "geometric", "steps_per_epoch": 100}
    source = StateTrackingConfig(**grows, growth_loss=0.25).build().source("train")
    assert isinstance(source, LevelledSource)
    assert (source.n_levels, source.level_loss) == (4, 0.25)
    for level, longest in enumerate([5, 10, 20, 40, 80]):
        here = source.at_level(level)
        lengths = [here.batch(epoch, step).inputs.shape[1] for epoch in (0, 7) for step in range(100)]
        assert min(lengths) == 3
        assert 0.8 * longest <= max(lengths) <= longest
        assert torch.equal(here.batch(7, 3).inputs, source.at_level(level).batch(7, 3).inputs)
    assert torch.equal(source.batch(7, 3).inputs, source.at_level(0).batch(7, 3).inputs)
    for level in (-1, 5):
        with pytest.raises(ValueError, match=f"^level is {level}; expected 0 to 4"):
            source.at_level(level)
    whole, parts = source.at_level(3), []
    for rank in range(2):
        shared = StateTrackingConfig(**grows, growth_loss=0.25).build(rank=rank, world_size=2).source("train")
        parts.append(shared.at_level(3).batch(1, 2).inputs)
    assert torch.equal(torch.cat(parts), whole.batch(1, 2).inputs)
    assert not isinstance(StateTrackingConfig(**grows, growth_loss=0.25).build().source("valid"), LevelledSource)
    assert not isinstance(StateTrackingConfig(**grows).build().source("train"), LevelledSource)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (StateTrackingConfig, {"growth_loss": 0.1}, r"data\.growth_loss is 0\.1; expected null without"),
        (StateTrackingConfig, {"task": "sorting"}, r"data\.task is 'sorting'; expected one of parity"),
        (StateTrackingConfig, {"min_length": 1}, r"data\.min_length is 1; expected at least 2"),
        (StateTrackingConfig, {"min_length": 41}, r"data\.max_length is 40; expected at least 41"),
        (StateTrackingConfig, {"final_length": 39}, r"data\.final_length is 39; expected at least 40"),
        (StateTrackingConfig, {"final_length": 80}, r"data\.growth_epochs is 0; expected at least 1 with"),
        (StateTrackingConfig, {"hold_epochs": 2}, r"data\.hold_epochs is 2; expected 0 without data\.final_length"),
        (StateTrackingConfig, {"eval_max_length": 39}, r"data\.eval_max_length is 39; expected at least 40"),
        (
            StateTrackingConfig,
            {"eval_piece": 8},
            r"data\.eval_piece is 8; expected null, or data\.eval_min_length = 256",
        ),
        (RecallConfig, {"n_pairs": 17}, r"data\.n_pairs is 17; expected at most 16"),
        (RecallConfig, {"vocabulary": 9}, r"data\.n_pairs is 4; expected fewer than half"),
        (RecallConfig, {"final_length": 128, "growth_epochs": 2}, r"data\.final_length is 128; expected null"),
        (RecallConfig, {"max_length": 66}, r"data\.max_length is 66; expected data\.min_length"),
    ],
)
def test_impossible_fields_are_named(config, fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        config(**fields)
