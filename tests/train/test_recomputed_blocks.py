"""Activation checkpointing: the same losses and gradients from blocks that keep their inputs alone."""

import pytest
import torch
from torch import nn

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train._distributed import recompute_blocks


def gradients(model, tokens):
    torch.manual_seed(1)
    losses, state = model.loss(tokens[:, :-1], tokens[:, 1:])
    model.zero_grad()
    losses.sum().backward()
    return losses, state, [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=11, n_layer=3, d_model=8, d_channel_mixing=8, dropout=0.2)
    return LanguageModel(config)


def test_losses_and_gradients_are_the_same_and_less_is_kept(model):
    tokens = torch.randint(0, 11, (2, 30))
    kept: list[int] = []

    def count(tensor):
        kept[-1] += tensor.numel()
        return tensor

    results = []
    for recompute in (False, True):
        if recompute:
            recompute_blocks(model)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            results.append(gradients(model, tokens))
    torch.testing.assert_close(results[1], results[0])
    assert kept[1] < 0.6 * kept[0]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"^training\.checkpoint_blocks is true, and Linear has none"):
        recompute_blocks(nn.Linear(2, 2))
