"""The training loop: one update at a time, from the position of the run to its end.

Everything that the next update depends on is either in the checkpoint or a pure function of it: weights, optimiser,
carried state and random states are saved, and the position determines the learning rate and the data. A resumed run
therefore equals the uninterrupted one, bit for bit if the arithmetic itself is reproducible.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils import get_total_norm

from recurra._files.writing import write_json
from recurra._process import StopSignal, hardware
from recurra.checks import sentence
from recurra.data.batches import IGNORED_TARGET, Batch, DataSet
from recurra.models.shell import LanguageModelShell
from recurra.ops._toolkit.graphs import Capture, CudaCapture, GraphedFunction
from recurra.state import detach
from recurra.train._ranks import Ranks, local, precision_note, whole
from recurra.train._resumable import ResumableRun
from recurra.train.checkpoint import Payload, versions
from recurra.train.config import TrainingConfig
from recurra.train.experiment import Experiment
from recurra.train.losses import few_positions
from recurra.train.metrics import JsonLog, RunningSums, RunProgress, TensorBoardLog
from recurra.train.optimizer import learning_rate_factor
from recurra.train.run_folder import RunFolder
from recurra.train.sequence_parallel import final_state

CAPTURABLE = frozenset({"adamw", "sgd", "muon"})
"""Optimisers whose step is a part of a CUDA graph: it counts updates and reads learning rates on the device. The step
of all others, such as SOAP, which counts in Python, runs after the graph."""


class TrainingDiverged(FloatingPointError):
    """The loss or the weights are no longer finite."""


class Trainer(ResumableRun):
    """One run: the model, optimiser and data of an experiment, and the loop that trains it.

    Args:
        experiment: what to train, on which data, and how.
        folder: the folder of the run; nothing is written before `fit`.
        evaluate: called with a model and a `BatchSource`; returns `loss` (nats per target) and `accuracy` (None if not
            measured). Several ranks pass `total`, which adds up numbers over them; a run that uses CUDA graphs passes
            `capture`.
        open_data: opens the data for one rank; None builds the experiment's data.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        evaluate: Callable[..., Any],
        *,
        open_data: Callable[[Experiment, Ranks], DataSet] | None = None,
    ) -> None:
        super().__init__(experiment, folder, open_data or _open)
        self.evaluate = evaluate
        self._trainable = [parameter for parameter in self.wrapped.parameters() if parameter.requires_grad]
        self.steps_in_graph = experiment.optimizer.algorithm in CAPTURABLE
        changes, capture = self._trainable, self._capture()
        self.graphs = GraphedFunction(self._compute, capture, changes=changes, refuse=self._refuse_graphs)
        self._validation_capture: Capture | None = None  # kept, so that evaluations use the same memory again
        self._is_new_best = False
        self._clock = perf_counter()

    def _capture(self) -> Capture | None:
        device = self.fabric.device
        if self.config.graphs == "off":
            return None
        if why := why_no_graphs(self.config, device, self.ranks.count):
            self._refuse_graphs(why)
            return None
        return CudaCapture(device)

    def resume(self, which: str) -> None:
        """Go back to a checkpoint, as `ResumableRun` does; the optimiser then keeps its state elsewhere."""
        super().resume(which)
        self.graphs.forget()

    def fit(self, console: Console | None = None) -> StopSignal:
        """Train to the end, or until SIGINT, SIGTERM or SIGHUP; the last step is saved in a checkpoint.

        Returns:
            the signal handler; its `received` is None if no signal came.

        Raises:
            TrainingDiverged: the loss or the weights are not finite.
            BlockingIOError: another process trains the run.
            FileExistsError: the folder has checkpoints of later steps, of a run that was not resumed.
            OSError: a file cannot be written, or the folder of the run was removed.
        """
        if not self.ranks.is_first:
            return self._fit(Console(quiet=True))
        self.folder.lock()
        try:
            self.checkpoints.require_none_after(self.position.step)
            return self._fit(console or Console())
        finally:
            self.folder.unlock()

    def _fit(self, console: Console) -> StopSignal:
        step = self.position.step
        logs: list[JsonLog | TensorBoardLog] = []
        if self.ranks.is_first:
            logs.append(JsonLog(self.folder.metrics, last_step=step))
            if self.config.tensorboard:
                logs.append(TensorBoardLog(self.folder.tensorboard, last_step=step))
        progress = RunProgress(self.total_steps, step, console)
        asked, device = self._asked_precision, self.fabric.device.type
        for note in filter(None, [precision_note(asked, self.config.precision, device), self.begin()]):
            progress.note(note)
        self._report_notes(progress)
        try:
            with StopSignal() as stop:
                self._loop(stop, logs, progress)
        except BaseException as error:
            with suppress(OSError):  # of a full disk: the first error is the one to report
                if isinstance(error, TrainingDiverged):  # on all ranks together
                    self.checkpoints.finish()
            for each in (progress, *logs):
                with suppress(OSError):
                    each.close()
            raise
        for each in (progress, *logs):
            each.close()
        self._write_summary()
        return stop

    def _report_notes(self, progress: RunProgress) -> None:
        while self._notes:
            progress.note(self._notes.pop(0))

    def _write_summary(self, steps: int | None = None) -> None:
        """Write the results so far; `steps`: of the last checkpoint, if that is not of this step."""
        if self.ranks.is_first:
            of_last = {} if steps is None else {"steps": steps, "epochs": steps / self.steps_per_epoch}
            write_json(self.folder.summary, self.summary() | of_last)

    def _loop(self, stop: StopSignal, logs: Sequence[JsonLog | TensorBoardLog], progress: RunProgress) -> None:
        self._clock = perf_counter()
        stopping, saved_at = False, self.position.step
        while not self.finished and not stopping:
            gradient_norm = self._update()
            self._report_notes(progress)
            self.folder.require_in_place()
            progress.advance(self.position.step)
            if record := self._record(gradient_norm):
                for log in logs:
                    log.write(record)
                progress.report(record)
            if self._is_new_best:  # now that the log has its score
                with self._off_the_clock():
                    self.checkpoints.save_best(self._finite_snapshot())
                    self._write_summary(saved_at)  # which names the step that scores of the best one are of
                self._is_new_best = False
            # Read once: a signal between the decision to save and the end of the loop would end it without saving.
            stopping = self.ranks.any(stop.received is not None)
            self.checkpoints.poll()
            if self._due(self.config.save_every or self.steps_per_epoch) or stopping:
                with self._off_the_clock():
                    self.checkpoints.save(self.position.step, self._finite_snapshot())
                    saved_at = self.position.step
                    # Also now, in case the process is killed before the end.
                    self._write_summary()
        self.checkpoints.finish()

    def _update(self) -> Tensor:
        """Make one update from up to `accumulate` batches, in which every counted target weighs the same."""
        at = self.position
        last = min(at.batch + self.config.accumulate, len(self.source))
        rates = self._learning_rates(last)
        batches = [self.ranks.cut(self.source.batch(at.epoch, number)) for number in range(at.batch, last)]
        counts = [int((batch.targets != IGNORED_TARGET).sum()) for batch in batches]
        total, n_steps = self.ranks.total(sum(counts), sum(batch.n_steps for batch in batches))
        weight = self.ranks.count / max(1.0, total)  # the gradients of several ranks are averaged
        given = [self._on_device(batch, n_targets) for batch, n_targets in zip(batches, counts)]
        carried = self.state if given[0][0].continues else None
        inside = rates if self.steps_in_graph else None
        losses, self.state, norm, gradients = self.graphs(given, carried, weight, inside)
        if inside is None:
            for parameter, gradient in zip(self._trainable, gradients):
                parameter.grad = gradient
            self._step(rates)
        self._set_learning_rates(rates)
        for loss, batch, n_targets in zip(losses, batches, counts):
            self.sums.add(loss, n_targets, batch.n_steps)
            self.levels.add(loss, n_targets)
        at.step += 1
        self.average.update(at.step)
        at.tokens += int(n_steps)
        at.batch = last
        if last == len(self.source):
            at.epoch, at.batch, self.state = at.epoch + 1, 0, None
            self.levels.end_epoch(self.ranks)
        return norm

    def _learning_rates(self, last: int) -> list[float]:
        """Return the learning rate of each group for an update of the batches up to `last`."""
        at = self.position
        scheduled = learning_rate_factor(
            at.step, self.total_steps, self.experiment.schedule, steps_per_epoch=self.steps_per_epoch
        )
        if hasattr(self.source, "relative_length"):  # a short step would otherwise count as much as a long one
            drawn = sum(self.source.relative_length(at.epoch, number) for number in range(at.batch, last))
            scheduled *= float(drawn) / (last - at.batch)
        return [scheduled * group["peak_lr"] for group in self.optimizer.param_groups]

    def _on_device(self, batch: Batch, n_targets: int) -> tuple[Batch, Tensor | None, float]:
        """Return a batch on the device, the positions of its targets if they are few, and the number of those."""
        on_device = self.fabric.device.type != "cpu"
        is_shell = isinstance(self.model, LanguageModelShell)
        positions = few_positions(batch.targets, n_targets, padded=on_device) if is_shell else None
        moved = self.fabric.to_device((batch.inputs, batch.targets, batch.poses, positions))
        inputs, targets, poses, positions = moved  # the borders stay on the host
        continues = self.config.carry_state and batch.continues
        batch = batch._replace(inputs=inputs, targets=targets, continues=continues, poses=poses)
        return batch, positions, float(n_targets)

    def _compute(
        self, given: list[tuple[Batch, Tensor | None, Any]], state: Any, weight: Any, rates: list[Any] | None
    ) -> tuple[list[Tensor], Any, Tensor, list[Tensor | None]]:
        """Return the losses of an update's batches, the next state, the gradient's norm and what the step needs of it.

        All numbers are arguments, since a graph repeats what else there is. With rates, the step is a part of it.
        """
        losses = []
        for batch, positions, n_targets in given:
            loss, objective, state = self._loss(batch, n_targets, state, positions)
            self.fabric.backward(objective * weight)
            losses.append(loss.detach())
        norm = self._clip_gradients().detach()
        if rates is not None:
            self._step(rates)
        return losses, state, norm, [parameter.grad for parameter in self._trainable]

    def _loss(
        self, batch: Batch, n_targets: Any, state: Any, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """Return a batch's summed loss, what to minimise, and its last state, with its gradients cut."""
        extra = {"poses": batch.poses, "cu_seqlens": batch.cu_seqlens, "positions": positions}
        extra = {name: value for name, value in extra.items() if value is not None}
        carried = state if batch.continues else None
        with self.fabric.autocast():
            loss, objective, state = self.wrapped(batch.inputs, batch.targets, n_targets, carried, **extra)
        if batch.cu_seqlens is not None:
            return loss, objective, None  # one for each packed sequence, all of which have ended
        return loss, objective, detach(state) if self.pieces is None else final_state(state, self.pieces)

    def _step(self, rates: Sequence[float | Tensor]) -> None:
        """Let the optimiser change the weights, with rates in float32 as they are in a graph."""
        self._set_learning_rates([rate if isinstance(rate, Tensor) else float(np.float32(rate)) for rate in rates])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _set_learning_rates(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
            if "capturable" in group:  # AdamW's own check, and a warning where no graph is captured
                group["capturable"] = isinstance(rate, Tensor)

    def _refuse_graphs(self, why: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # what a capture that failed has left
        if self.config.graphs == "on":
            raise ValueError(sentence("training.graphs", f"on, and {why}", "auto or off for this run"))
        if self.fabric.device.type == "cuda":
            self._notes.append(f"note: training.graphs auto is off here: {why}")

    def _clip_gradients(self) -> Tensor:
        """Scale the gradient down to its limit, if there is one, and return its norm from before."""
        limit = self.experiment.optimizer.gradient_clip
        if limit is None:
            return whole(get_total_norm([p.grad for p in self.wrapped.parameters() if p.grad is not None]))
        norm = self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        assert norm is not None
        return whole(norm)

    def _record(self, gradient_norm: Tensor) -> dict[str, Any]:
        """Return the record that is due after this step; empty if none is."""
        record: dict[str, Any] = {}
        if self._due(self.config.log_every):
            record |= self._training_record(gradient_norm)
        if self._due(self.config.eval_every or self.steps_per_epoch):
            with self._off_the_clock():
                record |= self._validation_record()
        if record and self.finished and "train_loss" not in record:  # this evaluation has ended the run
            record = self._training_record(gradient_norm) | record
        if not record:
            return record
        at = self.position
        return {
            "step": at.step,
            "epoch": math.ceil(at.step / self.steps_per_epoch),
            self.experiment.task.unit: at.tokens,
            "seconds": at.seconds,
            **record,
        }

    def _training_record(self, gradient_norm: Tensor) -> dict[str, Any]:
        self.sums.add_up(self.ranks)
        loss = self.sums.mean_loss()
        if self.sums.n_targets and not math.isfinite(loss):
            raise self._diverged("the training loss", loss)
        self._tick()
        record = {
            "train_loss": loss,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            f"{self.experiment.task.unit}_per_second": self.sums.n_tokens / self.sums.seconds,
            "gradient_norm": float(gradient_norm),
            **self.levels.record,
        }
        self.sums = RunningSums(self.fabric.device)
        return record

    def _validation_record(self) -> dict[str, float]:
        options: dict[str, Any] = {"total": self.ranks.total_of_sequences} if self.ranks.several else {}
        if self.graphs.capture is not None:  # in other memory: the carried state may be an output of a graph
            self._validation_capture = self._validation_capture or self.graphs.capture.fresh()
            options["capture"] = self._validation_capture
        scores = self.evaluate(self.average.model, self.validation, **options)
        if not math.isfinite(scores.loss):
            raise self._diverged("the validation loss", scores.loss)
        new: dict[str, int | float] = {"step": self.position.step, "loss": scores.loss}
        record = {"valid_loss": scores.loss}
        if scores.accuracy is not None:
            new["accuracy"] = record["valid_accuracy"] = scores.accuracy
        is_best = self._is_best(new)
        self.scores["last"] = new | {"since_best": 0 if is_best else self._since_best + 1}
        if is_best:
            self.scores["best"] = new
            self._is_new_best = True
        return record

    def _is_best(self, new: dict[str, int | float]) -> bool:
        best = self.scores.get("best")
        if best is None:
            return True
        if self.config.monitor == "loss":
            return new["loss"] < best["loss"]
        # A task that is solved has the same accuracy from then on, while its answers become surer.
        return (new["accuracy"], -new["loss"]) > (best["accuracy"], -best["loss"])

    def _finite_snapshot(self) -> Payload:
        """Return the snapshot if all weights are finite; a useless one must not displace good checkpoints."""
        self.folder.require_in_place()
        parameters = self.model.named_parameters()
        bad = next((name for name, p in parameters if not bool(local(p).isfinite().all())), None)
        if self.ranks.any(bad is not None):
            raise self._diverged(bad or "a weight of another rank", "a tensor with values that are not finite")
        return self.snapshot()

    def _diverged(self, name: str, got: object) -> TrainingDiverged:
        hint = "lower optimizer.learning_rate, increase schedule.warmup_steps or set optimizer.gradient_clip"
        if self.checkpoints.steps() or self.checkpoints.best.exists():
            hint += f"; the checkpoints saved before this step are in {self.folder.checkpoints}"
        return TrainingDiverged(f"step {self.position.step}: {sentence(name, got, 'finite numbers', hint)}")

    def summary(self) -> dict[str, Any]:
        """Return the results so far, and the versions and hardware that they were measured with."""
        at = self.position
        return {
            "finished": self.finished,
            "steps": at.step,
            "epochs": at.step / self.steps_per_epoch,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            self.experiment.task.unit: at.tokens,
            "seconds": at.seconds,
            f"{self.experiment.task.unit}_per_second": at.tokens / at.seconds if at.seconds else None,
            "ranks": self.ranks.count,
            "resumed_at": self.resumed_at,
            "validation": self.scores,
            "versions": versions(),
            "hardware": hardware(),
        }

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


def _open(experiment: Experiment, ranks: Ranks) -> DataSet:
    return experiment.build_data(rank=ranks.data_rank, world_size=ranks.data_count)


def why_no_graphs(config: TrainingConfig, device: torch.device, n_ranks: int) -> str:
    """Say why updates of a run cannot be graphs; "" if nothing but the run itself may show it."""
    reasons = {
        "there is no CUDA device": device.type != "cuda",
        "several processes train the run": n_ranks > 1,
        "training.compile is true": config.compile,
        "training.checkpoint_blocks is true": config.checkpoint_blocks,  # it restores random states on the host
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
