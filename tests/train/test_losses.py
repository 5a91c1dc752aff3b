"""The loss in training: targets that are few, and which parts of a model are called."""

import pytest
import torch
from tests.train.conftest import Batches

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import detach
from recurra.train.config import TrainingConfig
from recurra.train.evaluate import evaluate
from recurra.train.losses import Objective, few_positions


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(LanguageModelConfig(vocab_size=7, n_layer=1, d_model=4, mixer="gru", d_channel_mixing=8))


def numbers(n_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(7, (3, n_steps)), torch.randint(7, (3, n_steps))


def penalty_of(model, inputs, targets, state=None, **options) -> torch.Tensor:
    """What a batch's objective has beside its loss, over its number of targets."""
    lengths = {"cu_seqlens": options.pop("cu_seqlens")} if "cu_seqlens" in options else {}
    loss, objective, _ = Objective(model, TrainingConfig(**options))(inputs, targets, 1, state, **lengths)
    return objective.double() - loss.double()


@pytest.mark.parametrize(
    ("n_steps", "activation", "change"), [(1, 30.0, 20.0), (5, 30.0, 0.0), (5, 0.0, 20.0), (5, 30.0, 20.0)]
)
def test_the_penalty_is_its_formula_and_the_loss_is_the_models(model, n_steps, activation, change):
    inputs, targets = numbers(n_steps)
    before = model(inputs)[1]
    options = {"activation_penalty": activation, "change_penalty": change}
    loss, _, state = Objective(model, TrainingConfig(**options))(inputs, targets, 3 * n_steps, before)
    expected, expected_state = model.loss(inputs, targets, before)
    assert loss == expected.sum()
    for found, own in zip(state, expected_state):
        torch.testing.assert_close(found, own, rtol=0, atol=0)
    hidden = model.hidden(inputs, before)[0].detach()
    total = activation * sum(float(h) ** 2 for h in hidden.flatten()) / hidden.numel()
    if n_steps > 1:
        steps = [(hidden[:, t + 1] - hidden[:, t]).flatten() for t in range(n_steps - 1)]
        total += change * sum(float(d) ** 2 for step in steps for d in step) / (len(steps) * len(steps[0]))
    assert penalty_of(model, inputs, targets, before, **options).item() == pytest.approx(total, rel=1e-5, abs=1e-5)


def test_the_change_from_one_packed_sequence_to_the_next_is_no_penalty(model):
    """It is that of the sequences as rows of their own, weighted by their changes."""
    inputs, targets = torch.randint(7, (1, 9)), torch.randint(7, (1, 9))

    def penalty(borders):
        return penalty_of(model, inputs, targets, change_penalty=70.0, cu_seqlens=torch.tensor(borders))

    apart = [penalty_of(model, inputs[:, a:b], targets[:, a:b], change_penalty=70.0) for a, b in ((0, 3), (4, 9))]
    torch.testing.assert_close(penalty([0, 3, 4, 9]), (2 * apart[0] + 4 * apart[1]) / 6, rtol=1e-5, atol=1e-5)
    assert penalty(list(range(10))) == 0.0
    for with_empty in ([0, 0, 3, 3, 4, 9], [0, 3, 4, 9, 9]):
        assert penalty(with_empty) == penalty([0, 3, 4, 9])


def test_an_update_minimises_the_objective_and_the_log_has_the_loss(make_trainer, model, monkeypatch):
    options = {"activation_penalty": 0.5, "change_penalty": 0.25}
    monkeypatch.setattr("tests.train.conftest.ToyModel", lambda: model)
    trainer = make_trainer(**options)
    gradients = {}
    monkeypatch.setattr(trainer.optimizer, "step", lambda: gradients.update(grads(model)))
    batch = trainer.source.batch(0, 0)
    trainer._update()
    monkeypatch.undo()
    model.zero_grad()
    n_targets = batch.targets.numel()
    loss, objective, _ = Objective(model, trainer.config)(batch.inputs, batch.targets, n_targets, None)
    (objective / n_targets).backward()
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradients[name], gradient)
    assert float(trainer.sums.loss) == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("counted", [0, 1, 15])
def test_ranks_call_the_same_parts_however_many_targets_they_have(model, monkeypatch, counted):
    """FSDP gathers parameters at each call, on all ranks together: in training and in evaluation."""
    inputs, targets = numbers(5)
    targets.view(-1)[counted:] = IGNORED_TARGET
    calls = []
    for name in ("forward", "loss", "hidden", "losses"):
        method = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *a, m=method, n=name, **o: calls.append(n) or m(*a, **o))
    positions = few_positions(targets, counted, padded=False)
    Objective(model, TrainingConfig())(inputs, targets, counted, None, positions=positions)
    assert calls == ["hidden", "losses"]
    calls.clear()
    others = [15, 15]  # targets and steps of all ranks
    evaluate(model, Batches(Batch(inputs, targets, False)), total=lambda nats, right, *counts: [nats, right, *others])
    assert calls == ["hidden"]


@pytest.mark.parametrize(("n_counted", "by_parts"), [(0, True), (5, True), (6, False)])
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
    batch, positions, n_targets = trainer._on_device(Batch(inputs, targets, continues=False), n_counted)
    loss, _, left = trainer._loss(batch, n_targets, None, positions)
    assert formed == [n_counted if by_parts else 20]
    loss.backward()
    found = grads(model)
    model.zero_grad()
    losses, state = model.loss(inputs, targets)
    losses.sum().backward()
    torch.testing.assert_close(loss, losses.sum())
    torch.testing.assert_close(left, detach(state))
    for name, gradient in grads(model).items():
        torch.testing.assert_close(found[name], gradient)


def grads(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
