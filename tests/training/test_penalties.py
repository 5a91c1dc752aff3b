"""Penalties on activations: their values, their part in an update, and which models have them."""

import pytest
import torch

from recurra.models import LanguageModel, LanguageModelConfig
from recurra.state import detach
from recurra.training import TrainingConfig
from recurra.training.penalties import penalised_loss


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(LanguageModelConfig(vocab_size=7, n_layer=1, d_model=4, mixer="gru", d_channel_mixing=8))


def numbers(n_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(7, (3, n_steps)), torch.randint(7, (3, n_steps))


@pytest.mark.parametrize("n_steps", [1, 5])
@pytest.mark.parametrize(("activation", "change"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_the_penalty_is_its_formula_and_the_loss_is_the_models(model, n_steps, activation, change):
    inputs, targets = numbers(n_steps)
    _, before = model(inputs)
    config = TrainingConfig(activation_penalty=activation, change_penalty=change)
    losses, penalty, state = penalised_loss(model, inputs, targets, before, config)
    expected, expected_state = model.loss(inputs, targets, before)
    assert torch.equal(losses, expected)
    for found, own in zip(state, expected_state):
        torch.testing.assert_close(found, own, rtol=0, atol=0)
    hidden = model.hidden(inputs, before)[0].detach()
    total = activation * sum(float(h) ** 2 for h in hidden.flatten()) / hidden.numel()
    if n_steps > 1:
        steps = [(hidden[:, t + 1] - hidden[:, t]).flatten() for t in range(n_steps - 1)]
        total += change * sum(float(d) ** 2 for step in steps for d in step) / (len(steps) * len(steps[0]))
    assert penalty.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_adds_it_to_the_mean_loss_and_the_log_does_not(make_trainer, accumulate, model, monkeypatch):
    options = {"activation_penalty": 0.5, "change_penalty": 0.25}
    monkeypatch.setattr("tests.training.conftest.ToyModel", lambda: model)
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
        loss, penalty, state = penalised_loss(model, batch.inputs, batch.targets, state, trainer.config)
        state = detach(state)
        total, raw = total + loss.mean() + penalty, raw + loss.sum().item()
    (total / accumulate).backward()
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradients[name], gradient)
    assert float(trainer.sums.loss) == pytest.approx(raw, rel=1e-6)


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
