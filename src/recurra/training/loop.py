"""The training loop: one update at a time, from the position of the run to its end.

Everything that the next update depends on is either in the checkpoint or a pure function of it: weights, optimiser,
carried state and random states are saved, and the learning rate and the data follow from the position. A resumed run
therefore repeats the run that was not interrupted, bit for bit if the arithmetic itself is repeatable.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from recurra.checks import sentence
from recurra.data import IGNORED_TARGET, Batch, BatchSource, DataSet
from recurra.models.shell import LanguageModelShell
from recurra.saved_state import state_to_plain
from recurra.state import detach
from recurra.training.averaging import WeightAverage
from recurra.training.checkpoint import CheckpointFolder, Payload, load_weights, versions
from recurra.training.checkpoint_space import checkpoint_bytes, space_note
from recurra.training.csv_log import CsvLog
from recurra.training.experiment import Experiment, require_resumable, to_plain
from recurra.training.hardware import hardware
from recurra.training.losses import few_targets, loss_by_parts, to_minimise
from recurra.training.metrics import MetricLog, RunningSums, TensorBoardLog
from recurra.training.optimizer import build_optimizer
from recurra.training.precision import precision_note
from recurra.training.process import set_up_process, settled
from recurra.training.progress import RunProgress, watch
from recurra.training.random_state import random_state, set_random_state
from recurra.training.resuming import resumed_state
from recurra.training.run_folder import RunFolder
from recurra.training.schedule import learning_rate_factor, mean_relative_length, scale_learning_rates, warm_up_note
from recurra.training.signals import StopSignal


@runtime_checkable
class Scores(Protocol):
    """The result of an evaluation."""

    @property
    def loss(self) -> float:
        """Nats per target."""
        ...

    @property
    def accuracy(self) -> float | None:
        """The share of targets that were predicted; None if it was not measured."""
        ...


Evaluate = Callable[[nn.Module, BatchSource], Scores]


class TrainingDiverged(FloatingPointError):
    """The loss or the weights are no longer finite."""


@dataclass
class Position:
    """The position of a run: the next batch is number `batch` of epoch `epoch`. tokens: for video, frames."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """One run: the model, optimiser and data of an experiment, and the position in it.

    Args:
        experiment: what to train, on which data, and how.
        folder: the folder of the run; nothing is written before `fit`.
        evaluate: scores a model on a split, in float32.
        data: the data of the experiment, if they are open; None opens them.
    """

    def __init__(
        self, experiment: Experiment, folder: RunFolder, evaluate: Evaluate, *, data: DataSet | None = None
    ) -> None:
        self.config, self._asked_precision = settled(experiment.training), experiment.training.precision
        self.experiment, self.folder, self.evaluate = replace(experiment, training=self.config), folder, evaluate
        self.fabric = set_up_process(self.config)
        self.data = data = experiment.build_data() if data is None else data
        self.source, self.validation = data.source("train"), data.source("valid")
        self.model = experiment.build_model(data)
        if self.config.monitor == "accuracy" and not getattr(self.model, "forms_logits", True):
            came = f"accuracy, which needs logits, and {type(self.model).__name__} computes its loss without them"
            raise ValueError(sentence("training.monitor", came, "loss for this model"))
        self.wrapped, self.optimizer = self.fabric.setup(self.model, build_optimizer(self.model, experiment.optimizer))
        self._has_parts = isinstance(self.model, LanguageModelShell)
        if self.config.has_penalties and not self._has_parts:
            given, kind = (self.config.activation_penalty, self.config.change_penalty), type(self.model).__name__
            names, came = "training.activation_penalty and .change_penalty", f"{given[0]} and {given[1]}, for a {kind}"
            raise ValueError(sentence(names, came, "0 but for a language model"))
        for name in ("loss", "hidden", "losses") if self._has_parts else ("loss",):
            self.wrapped.mark_forward_method(name)
        self.average = WeightAverage(self.model, experiment.averaging)
        self.checkpoints = CheckpointFolder(folder.checkpoints, keep=self.config.keep_checkpoints)
        self.steps_per_epoch, self.total_steps = self.config.n_steps(len(self.source))
        self.position = Position()
        self.sums = RunningSums(self.fabric.device)
        self.state: Any = None
        self.scores: dict[str, dict[str, int | float]] = {}
        self.resumed_at: list[int] = []  # the steps at which the run resumed from a checkpoint
        self._begun: str | None = None
        self._clock = perf_counter()

    # --- the position of a run ---

    def begin(self) -> str:
        """Load the initial weights of the experiment if the run is at its start. `fit` calls this if nobody has.

        Returns:
            a line that says where the weights are from; empty for fresh weights.

        Raises:
            ValueError: the weights cannot be read, or do not fit the model.
        """
        if self._begun is None:
            self._begun = self.experiment.load_initial_weights(self.model) if self.position.step == 0 else ""
        return self._begun

    def snapshot(self) -> Payload:
        """Return everything that the next update and the next record depend on, as plain data."""
        return {
            "config": to_plain(self.experiment),
            "position": asdict(self.position),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": state_to_plain(self.state),
            "window": self.sums.state_dict(),
            "scores": self.scores,
            "resumed_at": list(self.resumed_at),
            "random": random_state(),
        }

    def resume(self, which: str) -> None:
        """Go back to a checkpoint: "last", "previous", "best" or a path. With "last", a run without checkpoints starts
        from the beginning. The run is then locked for other processes until `fit` ends.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model; the trainer is as it was.
            ValueError: the experiment differs from that of the checkpoint in a setting that may not change.
            BlockingIOError: another process trains the run.
        """
        if which == "last" and not self.checkpoints.steps():
            return  # `fit` calls `begin`
        path, saved = self.checkpoints.load(which, self.fabric.device)
        require_resumable(saved["config"], self.experiment)
        self.state = resumed_state(saved, path, self.model, self.optimizer)
        load_weights(self.model, saved["model"], path)
        self.average.load_state_dict(saved["average"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.position = Position(**saved["position"])
        self.sums.load_state_dict(saved["window"])
        self.scores = saved["scores"]
        # Older checkpoints lack this key. A finished run has nothing to resume.
        self.resumed_at = [*saved.get("resumed_at", ()), *([] if self.finished else [self.position.step])]
        self.folder.lock()
        self.checkpoints.drop_after(self.position.step)
        set_random_state(saved["random"])

    # --- the loop ---

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end."""
        return self.position.step >= self.total_steps

    def fit(self, console: Console | None = None) -> StopSignal:
        """Train to the end, or until SIGINT, SIGTERM or SIGHUP. In all cases, the last step is saved in a checkpoint.

        Returns:
            the signal handler; its `received` is None if no signal came.

        Raises:
            TrainingDiverged: the loss or the weights are not finite.
            BlockingIOError: another process trains the run.
            OSError: a file cannot be written, or the folder of the run went away.
        """
        self.folder.lock()
        try:
            return self._fit(console or Console())
        finally:
            self.folder.unlock()

    def _fit(self, console: Console) -> StopSignal:
        step = self.position.step
        logs: list[MetricLog] = [CsvLog(self.folder.metrics, last_step=step)]
        if self.config.tensorboard:
            logs.append(TensorBoardLog(self.folder.tensorboard, last_step=step))
        progress = watch(self.total_steps, step, console)
        for note in filter(None, self._notes()):
            progress.note(note)
        open_files: list[RunProgress | MetricLog] = [progress, *logs]
        try:
            with StopSignal() as stop:
                self._loop(stop, logs, progress)
        except BaseException:
            with suppress(OSError):  # of a full disk: the first error is the one to report
                _close(open_files)
            raise
        _close(open_files)
        self.folder.write_summary(self.summary())
        return stop

    def _notes(self) -> Iterator[str]:
        yield precision_note(self._asked_precision, self.config.precision, self.fabric.device.type)
        yield self.begin()
        yield warm_up_note(self.total_steps, self.experiment.schedule)
        size = checkpoint_bytes(self.model, self.experiment.optimizer, self.experiment.averaging)
        yield space_note(self.checkpoints.path, size)

    def _loop(self, stop: StopSignal, logs: list[MetricLog], progress: RunProgress) -> None:
        self._clock = perf_counter()
        stopping = False
        while not self.finished and not stopping:
            gradient_norm = self._update()
            self.folder.require_in_place()
            progress.advance(self.position.step)
            if record := self._record(gradient_norm):
                for log in logs:
                    log.write(record)
                progress.report(record)
            # Read once: a signal between the decision to save and the end of the loop would end it without saving.
            stopping = stop.received is not None
            if self._due(self.config.save_every or self.steps_per_epoch) or stopping:
                with self._off_the_clock():
                    self.checkpoints.save(self.position.step, self._finite_snapshot())
                    # Also now, in case the process is killed before the end.
                    self.folder.write_summary(self.summary())

    def _update(self) -> Tensor:
        """Make one update from up to `accumulate` batches, in which every counted target weighs the same."""
        at, config = self.position, self.experiment
        factor = learning_rate_factor(at.step, self.total_steps, config.schedule, steps_per_epoch=self.steps_per_epoch)
        last = min(at.batch + self.config.accumulate, len(self.source))
        factor *= mean_relative_length(self.source, at.epoch, range(at.batch, last))
        scale_learning_rates(self.optimizer, factor)
        batches = [self.source.batch(at.epoch, number) for number in range(at.batch, last)]
        counts = [int((batch.targets != IGNORED_TARGET).sum()) for batch in batches]
        for batch, n_targets in zip(batches, counts):
            loss, objective = self._loss(batch, n_targets)
            self.sums.add(loss, n_targets, batch.n_steps)
            self.fabric.backward(objective / max(1, sum(counts)))
        norm = self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        at.step += 1
        self.average.update(at.step)
        at.epoch, at.batch = (at.epoch, last) if last < len(self.source) else (at.epoch + 1, 0)
        at.tokens += sum(batch.n_steps for batch in batches)
        return norm

    def _loss(self, batch: Batch, n_targets: int) -> tuple[Tensor, Tensor]:
        """Return a batch's summed loss and what to minimise, and keep its last state, with its gradients cut."""
        by_parts = self._has_parts and (self.config.has_penalties or few_targets(n_targets, batch.targets))
        inputs, targets, poses = self.fabric.to_device((batch.inputs, batch.targets, batch.poses))
        extra = {} if poses is None else {"poses": poses}
        carried = self.state if self.config.carry_state and batch.continues else None
        penalty: Tensor | float = 0.0
        # Fabric applies the precision only to calls of forward.
        with self.fabric.autocast():
            if by_parts:
                losses, penalty, state = loss_by_parts(self.wrapped, inputs, targets, carried, self.config)
            else:
                losses, state = self.wrapped.loss(inputs, targets, carried, **extra)
        self.state = detach(state)
        return losses.sum(), to_minimise(losses, n_targets, penalty, self.config)

    def _clip_gradients(self) -> Tensor:
        """Scale the gradient down to its limit, if there is one, and return its norm from before."""
        limit = self.experiment.optimizer.gradient_clip
        if limit is None:
            return get_total_norm([p.grad for p in self.wrapped.parameters() if p.grad is not None])
        return self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=limit, error_if_nonfinite=False)

    # --- records and results ---

    def _record(self, gradient_norm: Tensor) -> dict[str, Any]:
        """Return the record that is due after this step; empty if none is."""
        record: dict[str, Any] = {}
        if self._due(self.config.log_every):
            record |= self._training_record(gradient_norm)
        if self._due(self.config.eval_every or self.steps_per_epoch):
            with self._off_the_clock():
                record |= self._validation_record()
        if not record:
            return record
        at = self.position
        return {
            "step": at.step,
            "epoch": math.ceil(at.step / self.steps_per_epoch),
            self.experiment.unit: at.tokens,
            "seconds": at.seconds,
            **record,
        }

    def _training_record(self, gradient_norm: Tensor) -> dict[str, Any]:
        loss = self.sums.mean_loss()
        if self.sums.n_targets and not math.isfinite(loss):
            raise self._diverged("the training loss", loss)
        self._tick()
        record = {
            "train_loss": loss,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            f"{self.experiment.unit}_per_second": self.sums.n_tokens / self.sums.seconds,
            "gradient_norm": float(gradient_norm),
        }
        self.sums = RunningSums(self.fabric.device)
        return record

    def _validation_record(self) -> dict[str, float]:
        scores = self.evaluate(self.average.model, self.validation)
        if not math.isfinite(scores.loss):
            raise self._diverged("the validation loss", scores.loss)
        new: dict[str, int | float] = {"step": self.position.step, "loss": scores.loss}
        record = {"valid_loss": scores.loss}
        if scores.accuracy is not None:
            new["accuracy"] = record["valid_accuracy"] = scores.accuracy
        self.scores["last"] = new
        if self._is_best(new):
            self.scores["best"] = new
            self.checkpoints.save_best(self._finite_snapshot())
        return record

    def _is_best(self, new: dict[str, int | float]) -> bool:
        best, monitor = self.scores.get("best"), self.config.monitor
        if best is None:
            return True
        return new["loss"] < best["loss"] if monitor == "loss" else new["accuracy"] > best["accuracy"]

    def _finite_snapshot(self) -> Payload:
        """Return the snapshot if all weights are finite; a useless one must not displace good checkpoints.

        A folder that went away must not come back with nothing but this checkpoint in it.
        """
        self.folder.require_in_place()
        for name, parameter in self.model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise self._diverged(name, "a tensor with values that are not finite")
        return self.snapshot()

    def _diverged(self, name: str, came: object) -> TrainingDiverged:
        mend = (
            "lower optimizer.learning_rate, increase schedule.warmup_steps or set optimizer.gradient_clip; "
            f"the checkpoints saved before this step are in {self.folder.checkpoints}"
        )
        return TrainingDiverged(f"step {self.position.step}: {sentence(name, came, 'finite numbers', mend)}")

    def summary(self) -> dict[str, Any]:
        """Return the results so far, and the versions and hardware that they were measured with."""
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
        self.sums.seconds += now - self._clock
        self.position.seconds += now - self._clock
        self._clock = now

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Leave out the time of a block, such as an evaluation, from the training time."""
        self._tick()
        yield
        self._clock = perf_counter()


def _close(open_files: Sequence[RunProgress | MetricLog]) -> None:
    for each in open_files:
        each.close()
