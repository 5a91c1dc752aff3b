"""Masks that are locked over time, and dropout of whole words."""

import pytest
import torch

from recurra.layers.dropout import DROPOUTS, LockedDropout, WordDropout


def test_a_locked_mask_is_the_same_at_every_step_and_different_in_every_row():
    y = LockedDropout(0.4)(torch.ones(6, 9, 50))
    assert torch.equal(y, y[:, :1].expand_as(y))
    assert not torch.equal(y[0], y[1])
    assert torch.equal(y.unique(), torch.tensor([0.0, 1 / 0.6]))


def test_masks_are_drawn_anew_and_keep_the_mean():
    dropout = LockedDropout(0.3)
    draws = torch.stack([dropout(torch.ones(2, 1, 500)) for _ in range(100)])
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws.mean(), torch.tensor(1.0), rtol=0.0, atol=0.02)


def test_a_word_is_dropped_wherever_it_stands():
    tokens = torch.randint(20, (4, 60))
    y = WordDropout(20, 0.5)(torch.ones(4, 60, 3), tokens)
    for word in tokens.unique():
        assert y[tokens == word].unique().numel() == 1
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_vmap_gives_each_a_mask_of_its_own():
    x, tokens = torch.ones(3, 2, 9, 50), torch.randint(20, (3, 2, 9))
    y = torch.func.vmap(LockedDropout(0.5), randomness="different")(x)
    assert not torch.equal(y[0], y[1])
    assert torch.equal(y, y[:, :, :1].expand_as(y))
    y = torch.func.vmap(WordDropout(20, 0.5), randomness="different")(x, tokens)
    assert set(y.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("build", [LockedDropout, lambda p: WordDropout(5, p)])
def test_nothing_is_dropped_in_evaluation_or_with_p_0(build):
    x, tokens = torch.randn(2, 3, 4), torch.randint(5, (2, 3))
    for dropout in (build(0.5).eval(), build(0.0)):
        inputs = (x, tokens) if isinstance(dropout, WordDropout) else (x,)
        assert dropout(*inputs) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(ValueError, match=f"p is {p}"):
        LockedDropout(p)
    with pytest.raises(ValueError, match=f"p is {p}"):
        WordDropout(5, p)


def test_the_mask_takes_the_type_of_what_it_masks():
    assert LockedDropout(0.5)(torch.ones(1, 2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_choices_by_name():
    x = torch.ones(3, 40, 40)
    independent, locked = (DROPOUTS[name](0.5)(x) for name in ("independent", "locked"))
    assert not torch.equal(independent[:, 0], independent[:, 1])
    assert torch.equal(locked[:, 0], locked[:, 1])
