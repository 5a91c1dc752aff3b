import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.data import memory_horizon
from recurra.data.memory_horizon import _draw_memory_horizon_tokens, memory_horizon_targets, memory_spans


def numbers_since_reset(sequence, step, reset_token):
    numbers = []
    for token in sequence[: step + 1]:
        numbers = [] if token == reset_token else [*numbers, token]
    return numbers


def compress(numbers, modulus):
    """First with last, second with last but one, ...; + and - in turn; the odd one in the middle alone."""
    numbers = list(numbers)
    value, sign = 0, 1
    while numbers:
        first = numbers.pop(0)
        value += sign * (first * numbers.pop() if numbers else first)
        sign = -sign
    return value % modulus


def brute_force(tokens, reset_token, modulus):
    return [
        [compress(numbers_since_reset(row, step, reset_token), modulus) for step in range(len(row))] for row in tokens
    ]


@st.composite
def problems(draw):
    largest = draw(st.integers(0, 12))
    n, length = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    token = st.integers(0, largest + 1) | st.just(largest + 1)
    rows = draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=n, max_size=n))
    return rows, largest + 1, draw(st.integers(1, 300))


@given(problems())
def test_targets_and_spans_equal_a_brute_force(problem):
    rows, reset_token, modulus = problem
    tokens = torch.tensor(rows)
    targets = memory_horizon_targets(tokens, reset_token=reset_token, modulus=modulus)
    assert targets.tolist() == brute_force(rows, reset_token, modulus)
    spans = [[len(numbers_since_reset(row, i, reset_token)) for i in range(len(row))] for row in rows]
    assert memory_spans(tokens, reset_token=reset_token).tolist() == spans
    assert targets.dtype == torch.int64


def test_worked_by_hand():
    tokens = torch.tensor([[5, 3, 1, 4, 2, 2, 5, 5, 1, 4, 4, 1]])
    # reset; 3; 3*1; 3*4 - 1; 3*2 - 1*4; 3*2 - 1*2 + 4; two resets; 1; 1*4; 1*4 - 4; 1*1 - 4*4 = -15
    assert memory_horizon_targets(tokens).tolist() == [[0, 3, 3, 11, 2, 8, 0, 0, 1, 4, 0, 36]]
    assert memory_spans(tokens).tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4]]


def test_a_long_sequence_without_a_reset_and_groups_of_uneven_length(monkeypatch):
    monkeypatch.setattr(memory_horizon, "_SEGMENTS_AT_ONCE", 3)
    tokens = _draw_memory_horizon_tokens(4, 301, largest_number=4, resets_per_sample=2, seed=1)
    tokens[0][tokens[0] == 5] = 4
    assert memory_horizon_targets(tokens).tolist() == brute_force(tokens.tolist(), 5, 51)


@pytest.mark.parametrize(
    ("number", "modulus"), [(200, 128), (2**31 + 11, 2**31 - 1), (2**40, 2**40 + 15), (126, 127), (127, 128)]
)
def test_numbers_at_the_edge_of_a_type_do_not_overflow(number, modulus):
    rows = [[number, number - 1, number, number, number - 2, number, number]]
    targets = memory_horizon_targets(torch.tensor(rows), reset_token=5, modulus=modulus)
    assert targets.tolist() == brute_force(rows, 5, modulus)


def test_bad_tokens_and_values_are_refused():
    for function in (memory_horizon_targets, memory_spans):
        for tokens in (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)):
            with pytest.raises((TypeError, ValueError), match="tokens"):
                function(tokens)
    with pytest.raises(ValueError, match=r"the smallest of tokens is -2; expected at least 0"):
        memory_horizon_targets(torch.tensor([[1, -2]]))


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 2**32))
def test_every_sequence_has_its_resets(length, resets, seed):
    resets = min(resets, length)
    tokens = _draw_memory_horizon_tokens(6, length, largest_number=4, resets_per_sample=resets, seed=seed)
    assert tokens.shape == (6, length)
    assert (tokens == 5).sum(dim=1).tolist() == [resets] * 6
    assert tokens.min() >= 0
    assert tokens.max() <= 5


def test_numbers_and_reset_places_are_uniform():
    tokens = _draw_memory_horizon_tokens(40_000, 10, largest_number=4, resets_per_sample=3, seed=0)
    # A multinomial count is within 5 standard deviations of its mean in all but one of a million draws.
    counts = np.bincount(tokens.flatten(), minlength=6)
    assert counts[5] == 120_000
    np.testing.assert_allclose(counts[:5], 56_000, atol=5 * np.sqrt(280_000 * 0.2 * 0.8))
    places = (tokens == 5).sum(dim=0)
    np.testing.assert_allclose(places, 12_000, atol=5 * np.sqrt(40_000 * 0.3 * 0.7))
    pairs = torch.einsum("ni,nj->ij", (tokens == 5).double(), (tokens == 5).double())
    together = pairs[~torch.eye(10, dtype=torch.bool)]
    chance = 3 / 10 * 2 / 9
    np.testing.assert_allclose(together, 40_000 * chance, atol=5 * np.sqrt(40_000 * chance * (1 - chance)))
