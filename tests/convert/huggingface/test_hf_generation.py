import copy

import pytest
import torch
from tests.convert.huggingface.conftest import VOCABULARY, greedy
from tests.convert.huggingface.tiny_tokenizer import tiny_tokenizer

from recurra.convert.huggingface import backbone
from recurra.convert.huggingface.configuration import RecurrentCache

NEW = 6  # past the end of the second segment


def generate(lm, tokens, **options):
    return lm.generate(tokens, **{"max_new_tokens": NEW, "do_sample": False, **options})


def test_greedy_equals_whole_texts(every_lm, prompt):
    found = generate(every_lm, prompt)[:, 7:].tolist()
    assert found == [greedy(every_lm, row, NEW) for row in prompt]
    assert len({tuple(row) for row in found}) > 1


def test_left_padded_rows_equal_rows_alone(lm, prompt):
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [1] * 7, [0, 0, 0, 1, 1, 1, 1]])
    tokens = prompt.masked_fill(mask == 0, VOCABULARY)
    expected = [greedy(lm, row[counts], NEW) for row, counts in zip(prompt, mask.bool())]
    assert generate(lm, tokens, attention_mask=mask)[:, 7:].tolist() == expected


def test_beams_equal_those_without_a_cache(lm, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    options = {"num_beams": 4, "num_return_sequences": 3, "attention_mask": mask, "output_scores": True}
    options["return_dict_in_generate"] = True
    cached, uncached = (generate(lm, prompt, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, atol=1e-6, rtol=0)
    # beams were exchanged on the way: otherwise a cache that stays where it is would do
    assert (cached.beam_indices.diff(dim=1) != 0).any()


def test_a_returned_cache_goes_on_with_the_whole_text_or_new_tokens(lm, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "return_dict_in_generate": True}
    first = generate(lm, prompt, max_new_tokens=3, **options)
    cache = first.past_key_values
    assert isinstance(cache, RecurrentCache)
    assert cache.get_seq_length() == 9  # all but the last
    said = torch.tensor([[1, 2], [3, 4], [5, 6]])
    text = torch.cat([first.sequences, said], 1)
    longer = torch.cat([mask, torch.ones(3, 5, dtype=mask.dtype)], 1)
    expected = [greedy(lm, row[counts], NEW) for row, counts in zip(text, longer.bool())]
    for tokens in (text, text[:, 9:]):
        going_on = {"attention_mask": longer, "past_key_values": copy.deepcopy(cache)}
        assert generate(lm, tokens, **going_on)[:, -NEW:].tolist() == expected, tokens.shape


def test_a_cache_that_has_read_all_is_refused(gateloop, prompt):
    cache = gateloop(prompt).past_key_values
    with pytest.raises(ValueError, match="has read 7 tokens and input_ids has 7"):
        generate(gateloop, prompt, past_key_values=copy.copy(cache))
    with pytest.raises(ValueError, match="has read 7 tokens and input_ids has 2"):
        generate(gateloop, prompt[:, :2], past_key_values=copy.copy(cache))


def test_a_prompt_in_pieces(lm, prompt):
    expected = generate(lm, prompt)
    assert torch.equal(generate(lm, prompt, prefill_chunk_size=3, past_key_values=RecurrentCache()), expected)
    assert torch.equal(generate(lm, prompt, prefill_chunk_size=3), expected)


@pytest.mark.parametrize("use_cache", [False, True])
def test_an_empty_prompt_is_refused(gateloop, prompt, use_cache):
    with pytest.raises(ValueError, match=r"input_ids is of shape \(3, 0\); expected at least one token"):
        generate(gateloop, prompt[:, :0], use_cache=use_cache)


def test_the_tokenizer_of_stop_strings_is_not_an_input(gateloop, prompt):
    for options in ({}, {"num_beams": 2}):
        with_it = generate(gateloop, prompt, tokenizer=tiny_tokenizer(), **options)
        assert torch.equal(with_it, generate(gateloop, prompt, **options))


def test_each_token_is_read_once(gateloop, prompt, read_lengths):
    lengths = read_lengths(gateloop)
    generate(gateloop, prompt)
    assert lengths == [7] + [1] * (NEW - 1)


@pytest.fixture
def read_lengths(monkeypatch):
    """The lengths of all calls of a model's body from here on."""

    def watch(lm):
        lengths, hidden = [], lm.model.hidden

        def counted(tokens, *arguments, **options):
            lengths.append(tokens.shape[1])
            return hidden(tokens, *arguments, **options)

        monkeypatch.setattr(lm.model, "hidden", counted)
        return lengths

    return watch


def assistant_of(lm, noise=0.05):
    """A model that agrees with another the less, the more noise its weights have; it drafts 4 tokens at a time."""
    assistant = copy.deepcopy(lm)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def test_an_assistant_changes_nothing(lm, prompt):
    expected = generate(lm, prompt[:1], max_new_tokens=12)
    found = generate(lm, prompt[:1], max_new_tokens=12, assistant_model=assistant_of(lm))
    assert torch.equal(found, expected)


def test_an_assistant_that_is_right_saves_calls(gateloop, prompt, read_lengths):
    assistant = assistant_of(gateloop, noise=0.0)
    lengths = read_lengths(gateloop)
    generate(gateloop, prompt[:1], max_new_tokens=15, assistant_model=assistant)
    assert lengths == [11, 5, 5]


def test_an_assistant_that_is_wrong_makes_no_call_long(gateloop, prompt, read_lengths, monkeypatch):
    monkeypatch.setattr(backbone, "_LONGEST_AGAIN", 3)
    assistant = assistant_of(gateloop, noise=2.0)
    expected = generate(gateloop, prompt[:1], max_new_tokens=15)
    lengths = read_lengths(gateloop)
    found = generate(gateloop, prompt[:1], max_new_tokens=15, assistant_model=assistant)
    assert torch.equal(found, expected)
    assert len(lengths) > 10
    assert max(lengths[1:]) <= 7 + 4 + 1  # the prompt is read again in front of a draft, but nothing piles up
