"""The training loop: one update at a time, from wherever the run stands to its end.

Everything that the next update depends on is either in the checkpoint or a pure function of what is there:
weights, optimiser, carried state and random states are saved; the learning rate and the data follow from
the position. That is why a resumed run repeats the one that was not interrupted, bit for bit where the
arithmetic itself is repeatable.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from recurra.data import IGNORED_TARGET, Batch, BatchSource
from recurra.saved_state import state_from_plain, state_to_plain
from recurra.state import detach
from recurra.training.averaging import WeightAverage
from recurra.training.checkpoint import CheckpointError, CheckpointFolder, Payload, load_weights, versions
from recurra.training.experiment import Experiment, require_resumable, to_plain
from recurra.training.hardware import hardware
from recurra.training.metrics import CsvLog, MetricLog, TensorBoardLog, Window
from recurra.training.optimizer import build_optimizer
from recurra.training.process import set_up_process
from recurra.training.progress import RunProgress, watch
from recurra.training.random_state import random_state, set_random_state
from recurra.training.run_folder import RunFolder
from recurra.training.schedule import learning_rate_factor, scale_learning_rates
from recurra.training.signals import StopSignal


@runtime_checkable
class Scores(Protocol):
    """What an evaluation says about a model."""

    @property
    def loss(self) -> float:
        """Nats per target."""
        ...

    @property
    def accuracy(self) -> float | None:
        """The share of targets that were predicted; None where that was not asked."""
        ...


Evaluate = Callable[[nn.Module, BatchSource], Scores]


class TrainingDiverged(FloatingPointError):
    """The loss or the weights are no longer finite numbers."""


@dataclass
class Position:
    """How far a run has come: the next batch is number `batch` of epoch `epoch`. tokens: of video, frames."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """One run: model, optimiser and data of an experiment, and the position in it.

    Args:
        experiment: what to train, on what, and how.
        folder: where everything is written, from `fit` on.
        evaluate: scores a model on a split, in float32.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder, evaluate: Evaluate) -> None:
        self.experiment, self.folder, self.evaluate = experiment, folder, evaluate
        self.config = experiment.training
        self.fabric = set_up_process(self.config)
        self.data = data = experiment.build_data()
        self.source, self.validation = data.source("train"), data.source("valid")
        self.model = experiment.build_model(data)
        if self.config.monitor == "accuracy" and not getattr(self.model, "forms_logits", True):
            raise ValueError(
                f"training.monitor is accuracy, but {type(self.model).__name__} computes its loss without the logits "
                "that accuracy would need; use loss"
            )
        self.wrapped, self.optimizer = self.fabric.setup(self.model, build_optimizer(self.model, experiment.optimizer))
        self.wrapped.mark_forward_method("loss")
        self.average = WeightAverage(self.model, experiment.averaging)
        self.checkpoints = CheckpointFolder(folder.checkpoints, keep=self.config.keep_checkpoints)
        self.steps_per_epoch, self.total_steps = self.config.n_steps(len(self.source))
        self.position = Position()
        self.window = Window(self.fabric.device)
        self.state: Any = None
        self.scores: dict[str, dict[str, int | float]] = {}
        self.resumed_at: list[int] = []  # the steps at which it went on from a checkpoint
        self._begun: str | None = None
        self._clock = perf_counter()

    # --- where a run stands ---

    def begin(self) -> str:
        """Give a run that is at its start the weights that its experiment starts from; `fit` does it otherwise.

        Returns:
            where they are from, in a line of words; nothing where they are the fresh ones.

        Raises:
            ValueError: they cannot be read, or do not fit.
        """
        if self._begun is None:
            self._begun = self.experiment.load_initial_weights(self.model) if self.position.step == 0 else ""
        return self._begun

    def snapshot(self) -> Payload:
        """Everything that the next update depends on, and what the log has not shown yet, as plain data."""
        return {
            "config": to_plain(self.experiment),
            "position": asdict(self.position),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": state_to_plain(self.state),
            "window": self.window.state_dict(),
            "scores": self.scores,
            "resumed_at": list(self.resumed_at),
            "random": random_state(),
        }

    def resume(self, which: str) -> None:
        """Go back to a checkpoint: "last", "previous", "best" or a path. A run that has none yet starts anew.

        Raises:
            CheckpointError: it is damaged, or of another model.
            ValueError: the experiment differs from the checkpoint's in more than how long to go on.
        """
        if which == "last" and not self.checkpoints.steps():
            return  # `fit` begins it
        path, saved = self.checkpoints.load(which, self.fabric.device)
        if saved["optimizer"] is None:
            raise CheckpointError(
                f"{path} holds weights without the optimiser's state, as `recurra convert` writes them: "
                "no training can go on from there"
            )
        require_resumable(saved["config"], self.experiment)
        load_weights(self.model, saved["model"], path)
        self.average.load_state_dict(saved["average"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.position = Position(**saved["position"])
        self.window.load_state_dict(saved["window"])
        self.scores = saved["scores"]
        # Older checkpoints do not know where their runs were resumed. A run that has nothing left to do does not go on.
        self.resumed_at = [*saved.get("resumed_at", ()), *([] if self.finished else [self.position.step])]
        if saved["state"] is not None:
            self.state = state_from_plain(saved["state"], self.model)
        self.checkpoints.drop_after(self.position.step)
        set_random_state(saved["random"])

    # --- the loop ---

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.position.step >= self.total_steps

    def fit(self, console: Console | None = None) -> StopSignal:
        """Train to the end, or until SIGINT or SIGTERM; either way the last step is in a checkpoint then.

        Returns:
            the signals that were watched for; `received` is None where there was none.

        Raises:
            TrainingDiverged: the loss or the weights are not finite.
        """
        step = self.position.step
        logs: list[MetricLog] = [CsvLog(self.folder.metrics, last_step=step)]
        if self.config.tensorboard:
            logs.append(TensorBoardLog(self.folder.tensorboard, last_step=step))
        progress = watch(self.total_steps, step, console or Console())
        if note := self.begin():
            progress.note(note)
        if self.total_steps <= self.experiment.schedule.warmup_steps:
            progress.note(
                f"note: all {self.total_steps} steps of this run lie in its warm-up "
                f"(schedule.warmup_steps {self.experiment.schedule.warmup_steps})"
            )
        try:
            with StopSignal() as stop:
                self._loop(stop, logs, progress)
        finally:
            progress.close()
            for log in logs:
                log.close()
        self.folder.write_summary(self.summary())
        return stop

    def _loop(self, stop: StopSignal, logs: list[MetricLog], progress: RunProgress) -> None:
        self._clock = perf_counter()
        stopping = False
        while not self.finished and not stopping:
            gradient_norm = self._update()
            progress.advance(self.position.step)
            if row := self._report(gradient_norm):
                for log in logs:
                    log.write(row)
                progress.report(row)
            # Read once: a signal that came after the question whether to save would end the loop unsaved.
            stopping = stop.received is not None
            if self._due(self.config.save_every or self.steps_per_epoch) or stopping:
                with self._off_the_clock():
                    self.checkpoints.save(self.position.step, self._finite_snapshot())
                    # Now too: a process that is killed has no later chance.
                    self.folder.write_summary(self.summary())

    def _update(self) -> Tensor:
        """One update from up to `accumulate` batches; each target of them weighs the same."""
        at, config = self.position, self.experiment
        factor = learning_rate_factor(at.step, self.total_steps, config.schedule, steps_per_epoch=self.steps_per_epoch)
        scale_learning_rates(self.optimizer, factor)
        last = min(at.batch + self.config.accumulate, len(self.source))
        batches = [self.source.batch(at.epoch, number) for number in range(at.batch, last)]
        counts = [int((batch.targets != IGNORED_TARGET).sum()) for batch in batches]
        for batch, n_targets in zip(batches, counts):
            loss = self._loss(batch)
            self.window.add(loss, n_targets, batch.n_steps)
            self.fabric.backward(loss / max(1, sum(counts)))
        norm = self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        at.step += 1
        self.average.update(at.step)
        at.epoch, at.batch = (at.epoch, last) if last < len(self.source) else (at.epoch + 1, 0)
        at.tokens += sum(batch.n_steps for batch in batches)
        return norm

    def _loss(self, batch: Batch) -> Tensor:
        """The summed loss of a batch, and the state it leaves for the next one, its gradients cut here."""
        inputs, targets = self.fabric.to_device((batch.inputs, batch.targets))
        carried = self.state if self.config.carry_state and batch.continues else None
        # Fabric applies the precision to calls of forward alone.
        with self.fabric.autocast():
            losses, state = self.wrapped.loss(inputs, targets, carried)
        self.state = detach(state)
        return losses.sum()

    def _clip_gradients(self) -> Tensor:
        """The norm of the whole gradient, as it was before it was scaled down to the limit, where there is one."""
        limit = self.experiment.optimizer.gradient_clip
        if limit is None:
            return get_total_norm([p.grad for p in self.wrapped.parameters() if p.grad is not None])
        return self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=limit, error_if_nonfinite=False)

    # --- what is said about it ---

    def _report(self, gradient_norm: Tensor) -> dict[str, Any]:
        """The row of the log that is due after this step; empty where none is."""
        row: dict[str, Any] = {}
        if self._due(self.config.log_every):
            row |= self._training_row(gradient_norm)
        if self._due(self.config.eval_every or self.steps_per_epoch):
            with self._off_the_clock():
                row |= self._validation_row()
        if not row:
            return row
        at = self.position
        return {
            "step": at.step,
            "epoch": math.ceil(at.step / self.steps_per_epoch),
            self.experiment.unit: at.tokens,
            "seconds": at.seconds,
            **row,
        }

    def _training_row(self, gradient_norm: Tensor) -> dict[str, Any]:
        loss = self.window.mean_loss()
        if self.window.n_targets and not math.isfinite(loss):
            raise self._diverged(f"the training loss is {loss}")
        self._tick()
        row = {
            "train_loss": loss,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            f"{self.experiment.unit}_per_second": self.window.n_tokens / self.window.seconds,
            "gradient_norm": float(gradient_norm),
        }
        self.window = Window(self.fabric.device)
        return row

    def _validation_row(self) -> dict[str, float]:
        scores = self.evaluate(self.average.model, self.validation)
        if not math.isfinite(scores.loss):
            raise self._diverged(f"the validation loss is {scores.loss}")
        new: dict[str, int | float] = {"step": self.position.step, "loss": scores.loss}
        row = {"valid_loss": scores.loss}
        if scores.accuracy is not None:
            new["accuracy"] = row["valid_accuracy"] = scores.accuracy
        self.scores["last"] = new
        if self._is_best(new):
            self.scores["best"] = new
            self.checkpoints.save_best(self._finite_snapshot())
        return row

    def _is_best(self, new: dict[str, int | float]) -> bool:
        best, monitor = self.scores.get("best"), self.config.monitor
        if best is None:
            return True
        return new["loss"] < best["loss"] if monitor == "loss" else new["accuracy"] > best["accuracy"]

    def _finite_snapshot(self) -> Payload:
        """The snapshot, unless it is of no use: it must not push good checkpoints out."""
        for name, parameter in self.model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise self._diverged(f"{name} holds values that are not finite")
        return self.snapshot()

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"step {self.position.step}: {what}. Lower optimizer.learning_rate, lengthen "
            "schedule.warmup_steps or set optimizer.gradient_clip; the checkpoints in "
            f"{self.folder.checkpoints} are of before"
        )

    def summary(self) -> dict[str, Any]:
        """The results so far, and what they were measured with."""
        at = self.position
        return {
            "finished": self.finished,
            "steps": at.step,
            "epochs": at.step / self.steps_per_epoch,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            self.experiment.unit: at.tokens,
            "seconds": at.seconds,
            f"{self.experiment.unit}_per_second": at.tokens / at.seconds if at.seconds else None,
            "resumed_at": self.resumed_at,
            "validation": self.scores,
            "versions": versions(),
            "hardware": hardware(),
        }

    # --- time ---

    def _due(self, every: int) -> bool:
        return self.position.step % every == 0 or self.finished

    def _tick(self) -> None:
        """Count the time since the last tick as training time."""
        now = perf_counter()
        self.window.seconds += now - self._clock
        self.position.seconds += now - self._clock
        self._clock = now

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Evaluating and saving are no training time."""
        self._tick()
        yield
        self._clock = perf_counter()
