"""The loss by its parts: the values of penalties, their part in an update, and targets that are few."""

import pytest
import torch

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import detach
from recurra.train.config import TrainingConfig
from recurra.train.evaluate import evaluate
from recurra.train.losses import Objective, _loss_by_parts


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


@pytest.mark.parametrize("n_steps", [1, 5])
@pytest.mark.parametrize(("activation", "change"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_the_penalty_is_its_formula_and_the_loss_is_the_models(model, n_steps, activation, change):
    inputs, targets = numbers(n_steps)
    _, before = model(inputs)
    config = TrainingConfig(activation_penalty=activation, change_penalty=change)
    losses, penalty, state = _loss_by_parts(model, inputs, targets, before, config)
    expected, expected_state = model.loss(inputs, targets, before)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    alone = _loss_by_parts(model, inputs, targets, before, config, few=True)[0]
    torch.testing.assert_close(alone[0], expected.flatten(), rtol=1e-6, atol=0)
    for found, own in zip(state, expected_state):
        torch.testing.assert_close(found, own, rtol=0, atol=0)
    hidden = model.hidden(inputs, before)[0].detach()
    total = activation * sum(float(h) ** 2 for h in hidden.flatten()) / hidden.numel()
    if n_steps > 1:
        steps = [(hidden[:, t + 1] - hidden[:, t]).flatten() for t in range(n_steps - 1)]
        total += change * sum(float(d) ** 2 for step in steps for d in step) / (len(steps) * len(steps[0]))
    assert torch.as_tensor(penalty).item() == pytest.approx(total, rel=1e-5)


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


def test_the_change_from_one_packed_sequence_to_the_next_is_no_penalty(model):
    """It is that of the sequences as rows of their own, weighted by their changes."""
    inputs, targets = torch.randint(7, (1, 9)), torch.randint(7, (1, 9))
    config = TrainingConfig(change_penalty=0.7)
    borders = torch.tensor([0, 3, 4, 9])
    _, packed, _ = _loss_by_parts(model, inputs, targets, None, config, cu_seqlens=borders)
    apart = [_loss_by_parts(model, inputs[:, a:b], targets[:, a:b], None, config)[1] for a, b in ((0, 3), (4, 9))]
    torch.testing.assert_close(packed, (2 * apart[0] + 4 * apart[1]) / 6)
    _, none, _ = _loss_by_parts(model, inputs, targets, None, config, cu_seqlens=torch.arange(10))
    assert none == 0.0
    for with_empty in ([0, 0, 3, 3, 4, 9], [0, 3, 4, 9, 9]):
        _, same, _ = _loss_by_parts(model, inputs, targets, None, config, cu_seqlens=torch.tensor(with_empty))
        torch.testing.assert_close(same, packed)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_adds_it_to_the_mean_loss_and_the_log_does_not(make_trainer, accumulate, model, monkeypatch):
    options = {"activation_penalty": 0.5, "change_penalty": 0.25}
    monkeypatch.setattr("tests.train.conftest.ToyModel", lambda: model)
    trainer = make_trainer(accumulate=accumulate, **options)
    assert trainer.model is model
    gradients = {}
    monkeypatch.setattr(trainer.optimizer, "step", lambda: gradients.update(grads(model)))
    batches = [trainer.source.batch(0, number) for number in range(accumulate)]
    trainer._update()
    monkeypatch.undo()
    model.zero_grad()
    state, total, raw = None, 0.0, 0.0
    for batch in batches:
        loss, penalty, state = _loss_by_parts(model, batch.inputs, batch.targets, state, trainer.config)
        state = detach(state)
        total, raw = total + loss.mean() + penalty, raw + loss.sum().item()
    (total / accumulate).backward()
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradients[name], gradient)
    assert float(trainer.sums.loss) == pytest.approx(raw, rel=1e-6)


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
    loss, objective = trainer._loss(Batch(inputs, targets, continues=False), n_counted)
    assert formed == [n_counted if by_parts else 20]
    assert torch.equal(objective, loss)
    objective.backward()
    found = grads(model)
    model.zero_grad()
    losses, state = model.loss(inputs, targets)
    losses.sum().backward()
    torch.testing.assert_close(loss, losses.sum())
    torch.testing.assert_close(trainer.state, detach(state))
    for name, gradient in grads(model).items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("q", [0.25, 0.7, 1.0])
def test_the_generalised_cross_entropy_weighs_gradients_by_powers_of_p(make_trainer, model, monkeypatch, q):
    monkeypatch.setattr("tests.train.conftest.ToyModel", lambda: model)
    trainer = make_trainer(generalised_cross_entropy=q)
    inputs, targets = torch.randint(5, (3, 4)), torch.randint(5, (3, 4))
    targets[0, :3] = IGNORED_TARGET
    losses, _ = model.loss(inputs, targets)
    p = torch.exp(-losses).detach()
    (p**q * losses).sum().backward()
    expected = grads(model)
    model.zero_grad()
    loss, objective = trainer._loss(Batch(inputs, targets, continues=False), 9)
    torch.testing.assert_close(loss, losses.sum())  # logs do not change
    torch.testing.assert_close(objective, ((1 - p**q) / q).sum())
    objective.backward()
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("q", [-0.1, 1.5])
def test_exponents_outside_their_range_are_refused(q):
    with pytest.raises(
        ValueError, match=rf"^training\.generalised_cross_entropy is {q}; expected a number in \[0, 1\]"
    ):
        TrainingConfig(generalised_cross_entropy=q)


def grads(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_other_models_are_refused(make_trainer):
    with pytest.raises(
        ValueError, match=r"^training\.activation_penalty and \.change_penalty is 0\.1 and 0\.0, for a ToyModel"
    ):
        make_trainer(activation_penalty=0.1)


@pytest.mark.parametrize("name", ["activation_penalty", "change_penalty"])
def test_negative_weights_are_refused(name):
    with pytest.raises(ValueError, match=rf"^training\.{name} is -1\.0; expected at least 0"):
        TrainingConfig(**{name: -1.0})


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
