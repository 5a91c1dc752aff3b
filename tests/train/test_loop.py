import json
import signal
from typing import Any, NamedTuple

import pytest
import torch
from tests.train.conftest import on_call, quiet, same_weights, trainer_in
from torch.nn.functional import cross_entropy

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.train.evaluate import evaluate
from recurra.train.loop import Trainer, TrainingDiverged
from recurra.train.metrics import _COLUMNS, RunProgress, read_metrics
from recurra.train.run_folder import RunFolder

MEASURED = [name for name in _COLUMNS if name not in ("tokens_per_second", "seconds")]


class Scores(NamedTuple):
    loss: float
    accuracy: float


def records(trainer: Trainer) -> list[list[Any]]:
    """What was logged, without what depends on the clock."""
    return [[row[name] for name in MEASURED] for row in read_metrics(trainer.folder.metrics)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def uninterrupted(request, tmp_path_factory) -> tuple[Trainer, dict]:
    """A finished run of 9 steps, and its settings."""
    settings = {
        "epochs": 3,
        "accumulate": 3,
        "log_every": 2,
        "eval_every": 1,
        "save_every": 4,
        "optimizer": {"gradient_clip": 0.5, "transition_learning_rate": 0.01},
        "schedule": {"warmup_steps": 2},
        "averaging": {"plain": {}, "averaged": {"start_step": 4}}[request.param],
    }
    whole = trainer_in(tmp_path_factory.mktemp("uninterrupted"), **settings)
    whole.fit(quiet())
    return whole, settings


@pytest.mark.parametrize(
    ("uninterrupted", "stop_at"),
    [
        ("plain", 2),
        ("averaged", 4),
        *(pytest.param("plain", step, marks=pytest.mark.slow) for step in (1, 4)),
        pytest.param("averaged", 8, marks=pytest.mark.slow),
    ],
    indirect=["uninterrupted"],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(make_trainer, stop_at, uninterrupted):
    """Stopped inside an epoch and at its end, at a record of the log and between two, at a checkpoint and at none.

    With an average, where it matters: before, at and after its first step, which is the fourth, and at the end.
    """
    whole, settings = uninterrupted
    first = make_trainer("parts", scorer=on_call(stop_at), **settings)
    assert first.fit(quiet()).received == signal.SIGTERM
    assert first.position.step == stop_at
    second = make_trainer("parts", **settings)
    torch.rand(stop_at)
    second.resume("last")
    second.fit(quiet())
    assert second.position.step == 9
    assert records(second) == records(whole)
    assert same_weights(second, whole)


def test_accumulated_batches_weigh_every_target_the_same(make_trainer):
    """Two batches, one with most of its targets ignored, make the gradient of one batch that holds both."""
    trainer = make_trainer(accumulate=2)
    batches = [trainer.source.batch(0, step) for step in range(2)]
    targets = batches[1].targets.clone()
    targets[:, 1:] = IGNORED_TARGET
    batches[1] = Batch(batches[1].inputs, targets, continues=False)
    trainer.source.batch = lambda epoch, step: batches[step]
    gradients = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
    )
    trainer.model.dropout.p = 0.0
    whole_inputs = torch.cat([batch.inputs for batch in batches])
    whole_targets = torch.cat([batch.targets for batch in batches])
    logits, _ = trainer.model(whole_inputs)
    cross_entropy(logits.flatten(0, 1), whole_targets.flatten(), ignore_index=IGNORED_TARGET).backward()
    expected = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad()

    trainer._update()
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    assert trainer.sums.n_targets == 15 + 3
    assert trainer.position.tokens == 30


@pytest.mark.parametrize("carry", [True, False])
def test_the_state_is_carried_where_the_data_goes_on_and_its_gradients_are_cut(make_trainer, carry):
    trainer = make_trainer(epochs=2, carry_state=carry)
    seen = []
    forward = trainer.model.forward

    def spy(tokens, state=None):
        seen.append((state, *forward(tokens, state)))
        return seen[-1][1:]

    trainer.model.forward = spy
    for _ in range(16):
        trainer._update()
    for step, (state, _, _) in enumerate(seen):
        if step % 8 == 0 or not carry:
            assert state is None
        else:
            assert torch.equal(state[0].total, seen[step - 1][2][0].total)
            assert not state[0].total.requires_grad


def test_a_best_checkpoint_is_saved_after_its_record(make_trainer, monkeypatch):
    """A run that is killed right after it, without another checkpoint, goes on from it and lacks no record."""
    trainer = make_trainer(epochs=1, log_every=2, eval_every=2, save_every=100)
    logged = []
    save = trainer.checkpoints.save_best

    def save_best(payload):
        logged.append((payload["position"]["step"], [int(row["step"]) for row in read_metrics(trainer.folder.metrics)]))
        save(payload)

    monkeypatch.setattr(trainer.checkpoints, "save_best", save_best)
    trainer.fit(quiet())
    assert logged
    assert all(steps[-1] == step for step, steps in logged)


def test_every_step_moves_the_progress(make_trainer, monkeypatch):
    steps = []
    monkeypatch.setattr(RunProgress, "advance", lambda self, step: steps.append(step))
    make_trainer(max_steps=4).fit(quiet())
    assert steps == [1, 2, 3, 4]


def test_the_logged_loss_is_the_mean_since_the_last_record(make_trainer):
    trainer = make_trainer(epochs=1, log_every=3, optimizer={"learning_rate": 1e-12})
    trainer.model.dropout.p = 0.0
    state, sums = None, []
    for step in range(8):
        batch = trainer.source.batch(0, step)
        logits, state = trainer.model(batch.inputs, state)
        sums.append(cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item())
    trainer.fit(quiet())
    logged = [float(row["train_loss"]) for row in read_metrics(trainer.folder.metrics)]
    assert logged == pytest.approx([sum(sums[:3]) / 3, sum(sums[3:6]) / 3, sum(sums[6:]) / 2], rel=1e-5)
    assert [row["step"] for row in read_metrics(trainer.folder.metrics)] == [3, 6, 8]


@pytest.mark.parametrize(("monitor", "best"), [("loss", 2), ("accuracy", 3)])
def test_the_best_checkpoint_is_chosen_by_the_score_that_is_monitored(make_trainer, monitor, best):
    scores = iter([Scores(3.0, 0.1), Scores(1.0, 0.2), Scores(2.0, 0.3), Scores(1.0, 0.2)])
    trainer = make_trainer(max_steps=4, eval_every=1, monitor=monitor, scorer=lambda model, source: next(scores))
    trainer.fit(quiet())
    _, saved = trainer.checkpoints.load("best")
    assert saved["position"]["step"] == best
    assert saved["scores"]["best"]["step"] == best
    summary = json.loads(trainer.folder.summary.read_text())
    assert summary["validation"]["best"]["step"] == best
    assert summary["validation"]["last"]["step"] == 4


def test_time_spent_evaluating_and_saving_is_not_training_time(make_trainer, monkeypatch):
    now = 0.0

    def takes(seconds, call):
        def timed(*arguments):
            nonlocal now
            now += seconds
            return call(*arguments)

        return timed

    monkeypatch.setattr("recurra.train.loop.perf_counter", lambda: now)
    settings = {"epochs": 1, "log_every": 4, "eval_every": 3, "save_every": 2}
    trainer = make_trainer(scorer=takes(100.0, evaluate), **settings)
    trainer._update = takes(1.0, trainer._update)
    trainer.checkpoints.save = takes(1000.0, trainer.checkpoints.save)
    trainer.checkpoints.save_best = takes(1000.0, trainer.checkpoints.save_best)
    trainer.fit(quiet())
    assert now > 8 + 3 * 100 + 4 * 1000
    assert trainer.position.seconds == 8
    logged = [(row["step"], row["seconds"], row["tokens_per_second"]) for row in read_metrics(trainer.folder.metrics)]
    assert logged == [(3, 3.0, None), (4, 4.0, 15.0), (6, 6.0, None), (8, 8.0, 15.0)]


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_good_checkpoints(make_trainer):
    trainer = make_trainer(epochs=2, save_every=2, log_every=50, eval_every=99)
    update = trainer._update

    def poisoned():
        norm = update()
        if trainer.position.step == 5:
            trainer.model.norm.weight.data[0] = torch.nan
        return norm

    trainer._update = poisoned
    with pytest.raises(TrainingDiverged, match=r"step 6: decay is .* not finite; .*optimizer\.learning_rate"):
        trainer.fit(quiet())
    assert [path.stem for path in trainer.checkpoints.steps()] == ["step-0000000002", "step-0000000004"]


def test_the_gradient_is_clipped_to_its_limit(make_trainer):
    trainer = make_trainer(optimizer={"gradient_clip": 1e-3})
    norms = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm().item())
    )
    before = trainer._update()
    assert before > 1e-3
    assert norms[0] == pytest.approx(1e-3, rel=1e-3)


def test_bfloat16_keeps_weights_states_and_losses_in_float32(make_trainer):
    trainer = make_trainer(max_steps=5, precision="bf16-mixed")  # within an epoch, where a state is carried
    trainer.fit(quiet())
    plain = make_trainer("plain", max_steps=5)
    plain.fit(quiet())
    assert all(tensor.dtype == torch.float32 for tensor in weights(trainer).values())
    assert trainer.state[0].total.dtype == torch.float32
    bf16, float32 = (float(records(one)[0][MEASURED.index("train_loss")]) for one in (trainer, plain))
    assert bf16 == pytest.approx(float32, rel=0.02)
    assert bf16 != float32


def test_a_run_leaves_a_complete_folder(make_trainer):
    trainer = make_trainer(epochs=1, tensorboard=True)
    trainer.fit(quiet())
    folder = RunFolder(trainer.folder.path)
    assert list(folder.tensorboard.iterdir())
    summary = json.loads(folder.summary.read_text())
    assert summary["finished"] is True
    assert summary["tokens"] == 120
    assert summary["parameters"] == sum(parameter.numel() for parameter in trainer.model.parameters())
    assert summary["hardware"]["threads"] == torch.get_num_threads()
