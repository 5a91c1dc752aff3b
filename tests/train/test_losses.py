"""The loss in training: targets that are few, and which parts of a model are called."""

import pytest
import torch

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import detach
from recurra.train.config import TrainingConfig
from recurra.train.evaluate import evaluate
from recurra.train.losses import Objective


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(LanguageModelConfig(vocab_size=7, n_layer=1, d_model=4, mixer="gru", d_channel_mixing=8))


class OneBatch:
    batch_size = 3

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def batch(self, epoch: int, step: int) -> Batch:
        return self._batch


def numbers(n_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(7, (3, n_steps)), torch.randint(7, (3, n_steps))


@pytest.mark.parametrize("counted", [0, 1, 15])
def test_ranks_call_the_same_parts_however_many_targets_they_have(model, monkeypatch, counted):
    """FSDP gathers parameters at each call, on all ranks together: in training and in evaluation."""
    inputs, targets = numbers(5)
    targets.view(-1)[counted:] = IGNORED_TARGET
    calls = []
    for name in ("forward", "loss", "hidden", "losses"):
        method = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *a, m=method, n=name, **o: calls.append(n) or m(*a, **o))
    Objective(model, TrainingConfig())(inputs, targets, counted, None)
    assert calls == ["hidden", "losses"]
    calls.clear()
    others = [15, 15]  # targets and steps of all ranks
    evaluate(model, OneBatch(Batch(inputs, targets, False)), total=lambda nats, right, *counts: [nats, right, *others])
    assert calls == ["hidden"]


@pytest.mark.parametrize(("n_counted", "by_parts"), [(0, True), (1, True), (5, True), (6, False), (20, False)])
def test_few_targets_have_the_same_loss_state_and_gradients(make_trainer, model, monkeypatch, n_counted, by_parts):
    """The share at which the way changes is a fourth: 5 of 20 positions."""
    monkeypatch.setattr("tests.train.conftest.ToyModel", lambda: model)
    trainer = make_trainer()
    inputs, targets = torch.randint(5, (4, 5)), torch.full((20,), IGNORED_TARGET)
    places = torch.randperm(20)[:n_counted]
    targets[places] = torch.randint(5, (n_counted,))
    targets = targets.view(4, 5)
    formed = []
    model.head.register_forward_hook(lambda head, inputs, logits: formed.append(logits.shape[:-1].numel()))
    loss = trainer._loss(Batch(inputs, targets, continues=False), n_counted)
    assert formed == [n_counted if by_parts else 20]
    loss.backward()
    found = grads(model)
    model.zero_grad()
    losses, state = model.loss(inputs, targets)
    losses.sum().backward()
    torch.testing.assert_close(loss, losses.sum())
    torch.testing.assert_close(trainer.state, detach(state))
    for name, gradient in grads(model).items():
        torch.testing.assert_close(found[name], gradient)


def grads(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_fsdp_is_refused_where_ranks_take_turns():
    config = TrainingConfig(strategy="fsdp", sequence_parallel=2)
    crt = CompactRecurrentTransformer(
        CompactRecurrentTransformerConfig(
            vocab_size=7, n_layer=1, d_model=8, n_heads=2, d_channel_mixing=8, segment_length=3
        )
    )
    with pytest.raises(ValueError, match=r"^training.strategy is fsdp; expected ddp with training.sequence_parallel"):
        Objective(crt, config)
    Objective(LanguageModel(LanguageModelConfig(7, None, 1, 8, 8)), config)
