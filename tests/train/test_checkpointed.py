"""Back-propagation piece by piece, with losses, padding, dropout, and the memory of one piece.

That outputs, state and gradients are those of one call is shown in tests/contracts.
"""

import weakref
from functools import partial

import jaxtyping
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recurra
from recurra.layers.embeddings import IGNORED_TARGET
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.shell import negative_log_likelihood
from recurra.state import tensors
from recurra.train._ranks import recompute_blocks
from recurra.train.losses import checkpointed

EXACT = {"rtol": 1e-10, "atol": 1e-12}
VOCABULARY = 11


def language_model(**options) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, 12, 16, **options)).double()


def test_a_loss_of_each_piece_is_summed():
    model = language_model()
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 13))
    targets[0, :6] = IGNORED_TARGET
    loss, last = checkpointed(
        model, tokens, piece=5, loss=lambda y, t: negative_log_likelihood(y, t).sum(), targets=targets
    )
    losses, expected_last = model.loss(tokens, targets)
    torch.testing.assert_close(loss, losses.sum(), **EXACT)
    torch.testing.assert_close(last, expected_last, **EXACT)
    weights = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, weights), torch.autograd.grad(losses.sum(), weights), **EXACT)


def test_padding_and_resets():
    model = language_model()
    tokens = torch.randint(VOCABULARY, (2, 9))
    mask, reset = torch.arange(9) >= torch.tensor([[6], [2]]), torch.arange(9) == torch.tensor([[7], [4]])
    y, last = checkpointed(model, tokens, piece=4, mask=mask, reset=reset)
    expected, expected_last = model(tokens, mask=mask, reset=reset)
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(last, expected_last, **EXACT)


def test_dropout_draws_the_same_numbers_again():
    """The gradient of a sum of x * noise is the noise itself, so it must be that of the forward pass."""

    class Noisy(nn.Module):
        def forward(self, x, state=None):
            y = nn.functional.dropout(x, 0.5)
            return y * y, state

    x = torch.ones(2, 40, 3, dtype=torch.float64, requires_grad=True)
    y, _ = checkpointed(Noisy(), x, piece=7)
    before = torch.get_rng_state()
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach(), **EXACT)
    assert torch.equal(torch.get_rng_state(), before)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the storages made inside it: those that live, and the most that lived at a time."""

    def __enter__(self):
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tensors(result if isinstance(result, (tuple, list)) else (result,)):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, n_bytes):
        self.now -= n_bytes


def peak_of(run) -> int:
    with PeakMemory() as memory:
        loss = run()
        loss.backward()
    return memory.peak


def saved_by(run) -> int:
    """Bytes of the tensors that autograd saves in a forward pass."""
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved)


def test_memory_is_that_of_one_piece():
    model = language_model(mixer="min-gru")
    weights = sum(parameter.numel() * 8 for parameter in model.parameters())

    def run(n_steps, piece):
        tokens, targets = torch.randint(VOCABULARY, (2, 1, n_steps))
        total = lambda y, t: negative_log_likelihood(y, t).sum()  # noqa: E731
        if piece is None:
            return total(model(tokens)[0], targets)
        return checkpointed(model, tokens, piece=piece, loss=total, targets=targets)[0]

    run(8, 4).backward()  # gradients stand in their memory from here on
    one = peak_of(partial(run, 64, None))
    whole = peak_of(partial(run, 1024, None))
    pieces = peak_of(partial(run, 1024, 64))
    borders = 16 * (2 * 12 * 8 * 3 + 200)  # states of both layers with their gradients, and small things
    tokens = 2 * 1024 * 8
    assert pieces < 1.5 * one + 2 * weights + borders + tokens
    assert 4 * pieces < whole
    assert saved_by(partial(run, 1024, 64)) == tokens  # and targets: the pieces as they come in
    assert saved_by(partial(run, 64, None)) > tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"piece": 0}, "piece is 0; expected at least 1"),
        ({"piece": 3, "targets": torch.zeros(1, 8)}, "targets .* expected None without a loss"),
        (
            {"piece": 3, "mask": torch.ones(1, 7, dtype=torch.bool)},
            r"mask is of shape \(1, 7\); expected \(1, 8, ...\)",
        ),
    ],
)
def test_refusals(options, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        checkpointed(recurra.create_mixer("min-gru", 12), torch.randn(1, 8, 12), **options)


# --- blocks that keep their inputs alone ---


def trained_on(model, tokens):
    torch.manual_seed(1)
    losses, state = model.loss(tokens[:, :-1], tokens[:, 1:])
    model.zero_grad()
    losses.sum().backward()
    return losses, state, [parameter.grad for parameter in model.parameters()]


def test_recomputed_blocks_have_the_same_gradients_and_keep_less():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocab_size=11, n_layer=3, d_model=8, d_channel_mixing=8, dropout=0.2))
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
            results.append(trained_on(model, tokens))
    torch.testing.assert_close(results[1], results[0])
    assert kept[1] < 0.6 * kept[0]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"^training\.checkpoint_blocks is true, and Linear has none"):
        recompute_blocks(nn.Linear(2, 2))
