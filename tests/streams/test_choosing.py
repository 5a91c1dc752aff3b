"""The kernel chooses the tokens that the plain form chooses, whichever rows stand beside a row."""

from collections import Counter

import numpy as np
import pytest
import torch

from recurra.streams._sampling_kernels import _value_at
from recurra.streams.sampling import SamplingConfig, TokenChoice, choose, sample

SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-45},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 700},
    {"top_k": 10**6},
    {"top_p": 0.03},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.4, "repetition_window": 3, "temperature": 0.0},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.4, "temperature": 0.0},
    {"logit_bias": {0: 4.0}, "temperature": 0.0},
    {"logit_bias": {0: -100.0}, "presence_penalty": -1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.4, "top_k": 90, "top_p": 0.83, "min_p": 0.02, "repetition_penalty": 1.2, "repetition_window": 9},
]


def rows_of(settings: list[dict], n_words: int, seed: int = 0) -> list[TokenChoice]:
    chance = torch.Generator().manual_seed(seed)
    return [
        TokenChoice(
            SamplingConfig(**some),
            torch.Generator().manual_seed(100 * seed + number),
            torch.randint(n_words, (number % 30,), generator=chance).tolist(),
            Counter(torch.randint(n_words, (7 * number,), generator=chance).tolist()),
        )
        for number, some in enumerate(settings)
    ]


def by_the_plain_form(logits, rows):
    chosen = []
    for row, one in zip(logits, rows):
        counts = torch.tensor([one.counts[token] for token in range(len(row))])
        chosen.append(int(sample(row, one.config, one.generator, torch.tensor(one.recent).long(), counts)))
    return chosen


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_the_largest_are_found_where_whole_blocks_are_ruled_out(backend):
    logits = torch.full((1, 128), -torch.inf)
    logits[0, :3] = torch.tensor([1.2, 1.1, 1.0])
    row = TokenChoice(SamplingConfig(top_k=3), torch.Generator().manual_seed(0))
    assert {int(choose(logits, [row], backend=backend)[0]) for _ in range(100)} == {0, 1, 2}


def test_a_row_that_rises_and_falls_is_halved_as_any_other():
    """With the middle as the pivot, each of 500 passes would drop one value."""

    class Counted(np.ndarray):
        def __getitem__(self, place):
            nonlocal n_reads
            n_reads += 1
            return super().__getitem__(place)

    n_reads, values = 0, -np.abs(np.arange(1001.0) - 500)
    with np.errstate(over="ignore"):  # which compiled code does not check
        found = _value_at.py_func(values.view(Counted), np.empty(0), 900.0)
    assert found == np.sort(values)[-900]
    assert n_reads < 40 * len(values)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n_words", [1, 2, 37, 1024, 5003])
def test_tokens_are_those_of_the_plain_form(n_words, kind):
    for seed in range(3):
        logits = (torch.randn(len(SETTINGS), n_words) * (0.02, 3, 30)[seed]).to(kind)
        chosen = choose(logits, rows_of(SETTINGS, n_words, seed), backend="numba")
        assert chosen == by_the_plain_form(logits, rows_of(SETTINGS, n_words, seed))


def test_ties_and_tokens_that_are_ruled_out():
    """Whole numbers put many tokens on every border."""
    for seed in range(0, 30, 3):
        logits = torch.randint(-3, 4, (len(SETTINGS), 211)).float()
        logits[:, torch.randperm(211)[: 7 * seed]] = -torch.inf
        chosen = choose(logits, rows_of(SETTINGS, 211, seed), backend="numba")
        assert chosen == by_the_plain_form(logits, rows_of(SETTINGS, 211, seed))
        assert all(row[token] > -torch.inf for row, token in zip(logits, chosen))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_logits_of_any_size(kind):
    sizes = 2.0 ** torch.linspace(-100, 100, 900)
    logits = (sizes * torch.randn(len(SETTINGS), 900).sign()).to(kind)
    chosen = choose(logits, rows_of(SETTINGS, 900), backend="numba")
    assert chosen == by_the_plain_form(logits, rows_of(SETTINGS, 900))
    even = torch.zeros(len(SETTINGS), 900, dtype=kind)
    assert choose(even, rows_of(SETTINGS, 900)) == by_the_plain_form(even, rows_of(SETTINGS, 900))


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_a_row_chooses_alone_as_beside_others(backend):
    settings = SETTINGS * 4
    logits = torch.randn(len(settings), 1500) * 2
    together, rows = rows_of(settings, 1500), rows_of(settings, 1500)
    for _ in range(3):
        chosen = choose(logits, together, backend=backend)
        assert chosen == [
            choose(logits[place : place + 1], [row], backend=backend)[0] for place, row in enumerate(rows)
        ]


def test_a_generator_gives_each_token_one_number():
    """So streams go on alike, whichever form chose their tokens before."""
    logits, config = torch.randn(1, 300), SamplingConfig(top_k=40, top_p=0.9)
    ours, plain = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    choose(logits, [TokenChoice(config, ours)], backend="numba")
    choose(logits, [TokenChoice(config, plain)], backend="reference")
    choose(logits, [TokenChoice(SamplingConfig(temperature=0.0), ours)])
    assert torch.equal(ours.get_state(), plain.get_state())


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.5}])
@pytest.mark.parametrize("bad", ["nan", "inf", "all ruled out", "overflow"])
def test_only_the_row_without_a_token_fails(bad, settings, backend):
    logits = torch.randn(4, 77)
    before = choose(logits, rows_of([settings] * 4, 77))
    broken = rows_of([settings] * 4, 77)
    if bad == "overflow":
        logits[2, 3], broken[2] = 3e38, TokenChoice(SamplingConfig(temperature=1e-3), torch.Generator())
    else:
        logits[2] = -torch.inf
        logits[2, 76] = float(bad) if bad in ("nan", "inf") else -torch.inf
    chosen = choose(logits, broken, backend=backend)
    assert isinstance(chosen[2], ValueError)
    assert "there is nothing to choose" in str(chosen[2])
    assert [chosen[place] for place in (0, 1, 3)] == [before[place] for place in (0, 1, 3)]


def test_the_logits_stay_as_they_are():
    logits = torch.randn(len(SETTINGS), 300)
    before = logits.clone()
    choose(logits, rows_of(SETTINGS, 300))
    assert torch.equal(logits, before)
    assert choose(logits[:0], []) == []
