"""Masks that are locked over time, dropout of whole words, and stochastic depth."""

import pytest
import torch

from recurra.layers.dropout import DROPOUTS, DropPath, LockedDropout, WordDropout


def test_a_locked_mask_is_the_same_at_every_step_and_different_in_every_row():
    y = LockedDropout(0.4)(torch.ones(6, 9, 50))
    assert torch.equal(y, y[:, :1].expand_as(y))
    assert not torch.equal(y[0], y[1])
    assert torch.equal(y.unique(), torch.tensor([0.0, 1 / 0.6]))


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


def test_choices_by_name():
    x = torch.ones(3, 40, 40)
    independent, locked = (DROPOUTS[name](0.5)(x) for name in ("independent", "locked"))
    assert not torch.equal(independent[:, 0], independent[:, 1])
    assert torch.equal(locked[:, 0], locked[:, 1])


def test_whole_rows_are_dropped_and_the_others_scaled():
    y = DropPath(0.25)(torch.ones(4000, 3, 2))
    rows = y.flatten(1)
    assert (rows == rows[:, :1]).all()
    assert set(rows[:, 0].tolist()) == {0.0, torch.tensor(1.0).div(0.75).item()}
    assert (rows[:, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_evaluation_and_p_of_0_give_x_itself():
    x = torch.randn(5, 2)
    assert DropPath(0.5).eval()(x) is x
    assert DropPath(0.0)(x) is x
