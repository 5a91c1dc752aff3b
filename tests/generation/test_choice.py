import pytest
import torch

from recurra.generation import draw, greedy


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_first_of_the_likeliest():
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -5.0, -6.0]])).tolist() == [1, 1]
    assert greedy(torch.tensor([0.0, 2.0])).shape == ()


def test_draws_are_as_frequent_as_they_are_probable():
    logits = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 0.0])
    n = 200_000
    counts = draw(logits.expand(n, 5), generator()).bincount(minlength=5)
    expected = logits.softmax(-1)
    deviations = (expected * (1 - expected) / n).sqrt()
    assert counts[3] == 0
    assert bool(((counts / n - expected).abs() <= 5 * deviations).all())


def test_equal_seeds_give_equal_draws_and_the_global_generator_is_not_touched():
    logits = torch.randn(4, 6, 31)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, two, other = (draw(logits, generator(seed)) for seed in (7, 7, 8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert one.shape == (4, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert draw(logits[0, 0], generator()).shape == ()


def test_a_single_possible_token_is_drawn():
    logits = torch.full((50, 9), -torch.inf)
    logits[:, 4] = -80.0
    assert draw(logits.half(), generator()).eq(4).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("choose", [greedy, lambda logits: draw(logits, generator())], ids=["greedy", "draw"])
def test_nothing_to_choose(choose, bad):
    with pytest.raises(ValueError, match="there is nothing to choose"):
        choose(torch.tensor([[0.0, 1.0], [bad, 0.0]]))
    with pytest.raises(ValueError, match="there is nothing to choose"):
        choose(torch.full((3,), -torch.inf))
