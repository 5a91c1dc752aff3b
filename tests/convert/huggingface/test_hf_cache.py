import copy

import pytest
import torch

from recurra.convert.huggingface.configuration import RecurrentCache


def read(lm, tokens, cache=None, **options):
    with torch.no_grad():
        output = lm(tokens, past_key_values=cache, **options)
    return output.logits, output.past_key_values


def test_the_model_makes_one_and_continues_from_it(every_lm, prompt):
    lm = every_lm
    whole, _ = read(lm, prompt)
    first, cache = read(lm, prompt[:, :3])
    assert isinstance(cache, RecurrentCache)
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (3, 3, True)
    second, same = read(lm, prompt[:, 3:], cache)
    assert same is cache
    assert cache.get_seq_length() == 7
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, bool(cache)) == (0, -1, True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_streams_are_repeated_reordered_and_selected(lm, prompt, padded):
    mask = torch.ones_like(prompt)
    if padded:
        mask[1, :4] = 0
    following = torch.tensor([[3, 1], [4, 1], [5, 9]])
    _, cache = read(lm, prompt, attention_mask=mask)
    expected, _ = read(lm, following, copy.copy(cache))

    repeated = copy.copy(cache)
    repeated.batch_repeat_interleave(2)
    assert repeated.batch_size == 6
    found, _ = read(lm, following.repeat_interleave(2, 0), repeated)
    torch.testing.assert_close(found, expected.repeat_interleave(2, 0), atol=1e-12, rtol=0)

    for change, order in (("reorder_cache", [2, 0, 0]), ("batch_select_indices", [1, 2])):
        changed = copy.copy(cache)
        getattr(changed, change)(torch.tensor(order))
        found, _ = read(lm, following[order], changed)
        torch.testing.assert_close(found, expected[order], atol=1e-12, rtol=0)


def test_gradients_flow_through_until_detached(gateloop, prompt):
    cache = gateloop(prompt, use_cache=True).past_key_values
    weight = gateloop.model.embedding.weight
    bookmark = copy.copy(cache)
    unseen = next(token for token in range(23) if not (prompt == token).any())
    gateloop(torch.full((3, 1), unseen), past_key_values=cache).logits[..., 0].sum().backward()
    through = weight.grad[prompt.unique()[-1]].abs().sum()
    bookmark.detach()
    gateloop.zero_grad()
    gateloop(torch.full((3, 1), unseen), past_key_values=bookmark).logits[..., 0].sum().backward()
    assert weight.grad[prompt.unique()[-1]].abs().sum() == 0
    assert through > 0


def read_in_pieces(lm, tokens, pieces, cache, mask=None):
    seen = 0
    for piece in tokens.split(pieces, 1):
        seen += piece.shape[1]
        _, cache = read(lm, piece, cache, attention_mask=None if mask is None else mask[:, :seen])
    return cache


@pytest.mark.parametrize(("pieces", "padded"), [([7], False), ([1] * 7, True), ([2, 4, 1], True)], ids=str)
def test_tokens_are_taken_back(lm, prompt, pieces, padded):
    """Inside of a call and at its borders, over one call and over several; what follows is what it would be anyway."""
    mask = torch.ones(3, 12, dtype=torch.long)
    if padded:
        mask[1, :4] = 0
    following = torch.tensor([[3, 1], [4, 1], [5, 9]])
    whole = read_in_pieces(lm, prompt, pieces, RecurrentCache(keeps=4), mask)
    for n_back in (0, 1, 4):
        cache, left = copy.copy(whole), prompt[:, : 7 - n_back]
        cache.crop(-n_back)
        assert (cache.get_seq_length(), cache.batch_size) == (7 - n_back, 3)
        text = torch.cat([left, following], 1)
        expected, _ = read(lm, text, attention_mask=mask[:, : text.shape[1]])
        for number in (0, 1):  # the second goes on from the state after the first
            found, cache = read(lm, following[:, [number]], cache, attention_mask=mask[:, : len(left[0]) + number + 1])
            torch.testing.assert_close(found[:, 0], expected[:, len(left[0]) + number], atol=1e-12, rtol=0)
    again, _ = read(lm, following, whole, attention_mask=mask[:, :9])  # the copies have left it as it was
    expected, _ = read(lm, torch.cat([prompt, following], 1), attention_mask=mask[:, :9])
    torch.testing.assert_close(again, expected[:, 7:], atol=1e-12, rtol=0)


def test_streams_that_are_reordered_are_taken_back_in_that_order(gateloop, prompt):
    for pieces in (3, 7):
        cache = read_in_pieces(gateloop, prompt, pieces, RecurrentCache(keeps=4))
        cache.crop(-1)  # also from what is read again
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.detach()
        cache.crop(-2)
        found, _ = read(gateloop, prompt[[2, 0, 1], 4:], cache)
        torch.testing.assert_close(found, read(gateloop, prompt)[0][[2, 0, 1], 4:], atol=1e-12, rtol=0)


def test_no_more_is_kept_than_can_be_taken_back(gateloop, prompt):
    cache = RecurrentCache(keeps=3)
    for _ in range(3):
        read_in_pieces(gateloop, prompt, 1, cache)
    cache.crop(-3)
    with pytest.raises(ValueError, match="tokens_to_remove is -1; expected 0, as many tokens as this cache can take"):
        cache.crop(-1)
    cache.reset()
    cache.crop(0)
    with pytest.raises(ValueError, match="expected 0,"):
        cache.crop(-1)


def test_what_is_not_kept_cannot_be_taken_back(gateloop, prompt):
    _, cache = read(gateloop, prompt)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"-1; expected 0, .*RecurrentCache\(keeps=1\)"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="tokens_to_remove is 3; expected 0 or below"):
        cache.crop(3)
    with pytest.raises(ValueError, match="keeps is -1; expected at least 0"):
        RecurrentCache(keeps=-1)
    with pytest.raises(NotImplementedError, match="not keys and values"):
        cache.update(None, None, 0)
