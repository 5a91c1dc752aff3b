"""Drafts from another model: the tokens, or the distribution, of the model alone."""

import copy
import math

import pytest
import torch
from torch import nn

from recurra.state import tensors
from recurra.streams.sampling import SamplingConfig, distribution
from recurra.streams.speculation import Speculation, accept
from recurra.streams.stream import Stream

from .conftest import VOCABULARY
from .test_stream import CLOSE, draw_tokens

LIKELIEST = SamplingConfig(temperature=0.0)


def noisy(model, noise):
    """A model that agrees with another the less, the more noise its weights have."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return other


def alone(model, prompt, n, **options):
    stream = Stream(model)
    stream.feed(prompt)
    return list(stream.generate(n, **options)), stream


def speculate(model, draft, prompt, n, n_drafted=4, **options):
    speculation = Speculation(Stream(model), Stream(draft), n_drafted=n_drafted)
    speculation.feed(prompt)
    return list(speculation.generate(n, **options)), speculation


# --- greedy ---


def test_the_likeliest_tokens_are_those_without_drafts(model):
    model, prompt = noisy(model, 0.3), draw_tokens(4)
    expected, stream = alone(model, prompt, 9, sampling=LIKELIEST)
    found, speculation = speculate(model, noisy(model, 0.05), prompt, 9, 3, sampling=LIKELIEST)
    assert found == expected
    assert speculation.stream.recent == speculation.draft.recent == stream.recent
    assert speculation.position == speculation.draft.position == stream.position
    torch.testing.assert_close(speculation.stream.logits, stream.logits, **CLOSE)
    for one, other in zip(tensors(speculation.stream.state), tensors(stream.state), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize(("noise", "n_drafted"), [(0.0, 1), (0.0, 7), (0.3, 3), (1.0, 2)])
def test_any_draft_is_right(gateloop, noise, n_drafted, monkeypatch):
    monkeypatch.setattr("recurra.streams.speculation._LONGEST_UNREAD", 5)
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    config = SamplingConfig(temperature=0.0, logit_bias={2: 0.5}, **penalties)
    prompt, options = draw_tokens(3), {"sampling": config}
    expected, _ = alone(gateloop, prompt, 20, **options)
    found, speculation = speculate(gateloop, noisy(gateloop, noise), prompt, 20, n_drafted, **options)
    assert found == expected
    drafts = speculation.drafts
    assert (drafts.acceptance_rate == 1) == (noise == 0)
    assert drafts.n_calls == 20 - drafts.n_accepted
    if noise == 0:
        assert drafts.n_calls == math.ceil(20 / (n_drafted + 1))


# --- sampling ---


def shares(*numbers):
    return torch.tensor(numbers, dtype=torch.float64) / sum(numbers)


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_rule_keeps_the_distribution():
    """Counts of two tokens and the one after them, where the second's distributions depend on the first."""
    generator = torch.Generator().manual_seed(0)
    q, p = shares(5, 1, 2, 2), shares(1, 3, 2, 2)
    q_after = torch.stack([shares(1, 1, 4, 2), shares(2, 3, 1, 1), shares(1, 1, 1, 1), shares(9, 1, 1, 1)])
    p_after = torch.stack([shares(4, 2, 1, 1), shares(1, 1, 3, 2), shares(3, 2, 2, 1), shares(1, 1, 1, 4)])
    counts, n_draws = torch.zeros(4, 4), 1500
    for _ in range(n_draws):
        first = int(q.multinomial(1, generator=generator))
        second = int(q_after[first].multinomial(1, generator=generator))
        n_accepted, token = accept([first, second], [q, q_after[first]], [p, p_after[first], p], generator)
        chosen = [*[first, second][:n_accepted], token]
        if len(chosen) == 1:  # the next round
            chosen.append(int(p_after[token].multinomial(1, generator=generator)))
        counts[chosen[0], chosen[1]] += 1
    assert chi_square(counts, n_draws * p[:, None] * p_after) < 37.7  # 99.9% of chi-square with 15 degrees


class Chain(nn.Module):
    """A model whose next token depends on the last one alone, by a table of logits."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, tokens, state=None):
        return self.table[tokens], tokens[:, -1:]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_tokens_are_distributed_as_without_drafts(options):
    torch.manual_seed(1)
    table = torch.randn(4, 4, dtype=torch.float64)
    model, draft, sampling = Chain(table).eval(), Chain(table + torch.randn(4, 4)).eval(), SamplingConfig(**options)
    tokens, speculation = speculate(model, draft, [0], 400, n_drafted=3, sampling=sampling, seed=5)
    assert 0.3 < speculation.drafts.acceptance_rate < 0.9
    counts = torch.zeros(4, 4)
    for before, after in zip([0, *tokens], tokens):
        counts[before, after] += 1
    expected = counts.sum(1, keepdim=True) * distribution(table, sampling)
    possible = expected > 0
    assert not counts[~possible].any()
    assert chi_square(counts[possible], expected[possible]) < 32.9  # 99.9% of chi-square with 12 degrees


# --- ends ---


@pytest.mark.parametrize("n_given", [1, 3, 4, 6])
def test_a_stream_that_is_left_has_read_what_it_gave_out(gateloop, n_given):
    prompt = draw_tokens(4)
    expected, stream = alone(gateloop, prompt, n_given, sampling=LIKELIEST)
    for noise in (0.0, 0.1):
        speculation = Speculation(Stream(gateloop), Stream(noisy(gateloop, noise)), n_drafted=3)
        speculation.feed(prompt)
        tokens = speculation.generate(sampling=LIKELIEST)
        assert [next(tokens) for _ in range(n_given)] == expected
        tokens.close()
        assert speculation.stream.recent == speculation.draft.recent == stream.recent
        torch.testing.assert_close(speculation.stream.logits, stream.logits, **CLOSE)


def test_stop_tokens_and_texts(gateloop, words):
    prompt = draw_tokens(4)
    tokens, _ = alone(gateloop, prompt, 12, sampling=LIKELIEST)
    stop = tokens[6]
    expected = tokens[: tokens.index(stop) + 1]
    found, speculation = speculate(gateloop, gateloop, prompt, 12, sampling=LIKELIEST, stop_tokens=[stop])
    assert found == expected
    assert speculation.position == 4 + len(expected)


def test_text(words):
    torch.manual_seed(0)
    model = Chain(torch.randn(len(words), len(words))).eval()
    stream, speculation = Stream(model, words), Speculation(Stream(model, words), Stream(model, words))
    stream.feed("the dog")
    speculation.feed("the dog")
    expected = "".join(stream.generate_text(10, sampling=LIKELIEST))
    assert "".join(speculation.generate_text(10, sampling=LIKELIEST)) == expected
    stop = expected.split()[-1]
    stream, speculation = Stream(model, words), Speculation(Stream(model, words), Stream(model, words))
    stream.feed("the dog")
    speculation.feed("the dog")
    expected = "".join(stream.generate_text(stop=[stop], sampling=LIKELIEST))
    assert "".join(speculation.generate_text(stop=[stop], sampling=LIKELIEST)) == expected
    assert speculation.position == stream.position


def test_a_draft_that_has_read_nothing_begins_with_the_last_tokens(gateloop):
    prompt = draw_tokens(9)
    stream = Stream(gateloop)
    stream.feed(prompt)
    speculation = Speculation(stream, Stream(gateloop))
    assert list(speculation.generate(8, sampling=LIKELIEST)) == alone(gateloop, prompt, 8, sampling=LIKELIEST)[0]
    assert speculation.drafts.acceptance_rate == 1


def test_refusals(gateloop, words, bpe):
    with pytest.raises(ValueError, match="n_drafted is 0; expected at least 1"):
        Speculation(Stream(gateloop), Stream(gateloop), n_drafted=0)
    other = Chain(torch.randn(5, 5)).eval()
    with pytest.raises(ValueError, match=f"draft is of None tokens; expected a model of {VOCABULARY}"):
        Speculation(Stream(gateloop), Stream(other))
    with pytest.raises(ValueError, match="draft is of another tokenizer"):
        Speculation(Stream(gateloop, words), Stream(gateloop, bpe))
    with pytest.raises(ValueError, match="the stream is at its start"):
        list(Speculation(Stream(gateloop), Stream(gateloop)).generate(3))
