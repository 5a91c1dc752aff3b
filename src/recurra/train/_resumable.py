"""The model, optimiser, data and random states of a run in training, to a checkpoint and back."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recurra._files.writing import discard
from recurra.checks import sentence
from recurra.data.batches import BatchSource, DataSet
from recurra.state import map_tensors, state_from_tensors, state_to_tensors
from recurra.train._ranks import Ranks, recompute_blocks, reseed, set_up_process, settled, shard
from recurra.train.checkpoint import CheckpointError, CheckpointFolder, Payload, load_checkpoint, require_fitting
from recurra.train.experiment import Experiment, require_resumable, to_plain
from recurra.train.losses import Levels, Objective
from recurra.train.metrics import RunningSums
from recurra.train.optimizer import WeightAverage, build_optimizer
from recurra.train.run_folder import RunFolder


def _random_state() -> dict[str, Any]:
    """Return the states of all generators that training may draw from, as numbers, lists and tensors."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - this saves the global generator
    inner = numpy_state["state"]
    return {
        "python": list(random.getstate()),
        "numpy": {**numpy_state, "state": {**inner, "key": inner["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    """Restore what `_random_state` returned, of CUDA only on as many devices."""
    kind, words, spare = state["python"]
    random.setstate((kind, tuple(words), spare))
    inner = state["numpy"]["state"]
    key = np.asarray(inner["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**inner, "key": key}})  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])


@dataclass
class Position:
    """The position of a run: the next batch is number `batch` of epoch `epoch`. tokens: for video, frames."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0


class ResumableRun:
    """A run that can stop anywhere and continue: all that its next update depends on, to a checkpoint and back."""

    def __init__(
        self, experiment: Experiment, folder: RunFolder, open_data: Callable[[Experiment, Ranks], DataSet]
    ) -> None:
        self.config, self._asked_precision = settled(experiment.training), experiment.training.precision
        self.experiment, self.folder = replace(experiment, training=self.config), folder
        self.fabric = set_up_process(self.config)
        self.ranks = Ranks(self.fabric.global_rank, self.fabric.world_size, self.config.sequence_parallel)
        self.pieces = self.ranks.pieces
        with self.fabric.rank_zero_first(local=True):  # what is made on first use is made once
            self.data = data = open_data(experiment, self.ranks)
        self._data_fingerprint = experiment.task.fingerprint(data)
        self.levels, self.validation = Levels(data.source("train"), self.fabric.device), data.source("valid")
        self.model = experiment.build_model(data)
        self._begun: str | None = None
        if experiment.lora.rank is not None:  # also to resume: the checkpoints have the adapters alone
            self._begun = experiment.load_initial_weights(self.model, data)
        self.adapters = experiment.add_adapters(self.model)
        if self.config.monitor == "accuracy" and not getattr(self.model, "forms_logits", True):
            got = f"accuracy, which needs logits, and {type(self.model).__name__} computes its loss without them"
            raise ValueError(sentence("training.monitor", got, "loss for this model"))
        # Sharding leaves nothing to copy: what averages the weights is made before.
        self.average = WeightAverage(self.model, self.experiment.averaging, shard=self._shard)
        if self.config.checkpoint_blocks:
            recompute_blocks(self.model)
        objective = Objective(self.model, self.config, self.pieces).to(self.fabric.device)
        if self.config.compile:
            objective.compile()
        # Not Fabric's own wrapper: it would convert the carried states that go in to the type of the products.
        self.wrapped = self.fabric.strategy.setup_module(objective)
        optimizer = build_optimizer(self.model, self.experiment.optimizer, precision=self.config.precision)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        reseed(self.config, self.ranks.rank)
        self.checkpoints = self._open_checkpoints()
        self.steps_per_epoch, self.total_steps = self.config.n_steps(len(self.source))
        self.position = Position()
        self.sums = RunningSums(self.fabric.device)
        self.state: Any = None
        self.scores: dict[str, dict[str, int | float]] = {}
        self.resumed_at: list[int] = []  # the steps at which the run resumed from a checkpoint
        self._notes: list[str] = []

    @property
    def _shard(self) -> Callable[[nn.Module], nn.Module] | None:
        if not (self.ranks.several and self.config.strategy == "fsdp"):
            return None
        device = self.fabric.device
        return lambda model: shard(model.to(device), self.fabric.strategy.device_mesh["data_parallel"])

    def _open_checkpoints(self) -> CheckpointFolder:
        path, keep = self.folder.checkpoints, self.config.keep_checkpoints
        if not self.ranks.several:
            return CheckpointFolder(path, keep=keep)
        from recurra.train._distributed_checkpoint import RankCheckpoints, RankLayout  # slow to import

        self._layout = RankLayout(self.model, self.optimizer, self.ranks, self.fabric.device.type)
        asynchronous = self.config.asynchronous_saving
        return RankCheckpoints(path, keep=keep, ranks=self.ranks, asynchronous=asynchronous)

    @property
    def source(self) -> BatchSource:
        return self.levels.source

    def begin(self) -> str:
        """Load the weights of `init_from` if the run is at its start, and return a line on them, or "".

        `fit` calls this if nobody has.
        """
        if self._begun is None and self.position.step == 0:
            whole = self.model if self._shard is None else self.experiment.build_model(self.data)
            self._begun = self.experiment.load_initial_weights(whole, self.data)
            if self._begun and whole is not self.model:
                parts = {name: self._layout.place(f"model.{name}", x) for name, x in whole.state_dict().items()}
                self.model.load_state_dict(parts)
        return self._begun or "" if self.adapters is None else f"{self._begun}; {self.adapters}"

    def snapshot(self) -> Payload:
        """Return all that the next update and record depend on, as plain data; ranks call this together."""
        several, state = self.ranks.several, state_to_tensors(self.state)
        return {
            "config": to_plain(self.experiment),
            "position": asdict(self.position),
            "model": self.model.state_dict(),
            "data": self._data_fingerprint,
            "base": self.adapters and self.adapters.base,
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": map_tensors(self._layout.of_all_streams, state) if several else state,
            "window": self.sums.state_dict(self.ranks),
            "levels": self.levels.state_dict(self.ranks),
            "scores": self.scores,
            "resumed_at": list(self.resumed_at),
            "random": self.ranks.gather(_random_state()) if several else _random_state(),
        }

    def resume(self, which: str) -> None:
        """Go back to a checkpoint: "last", "previous", "best" or a path; then lock the run until `fit` ends.

        With "last", a run without checkpoints of steps continues from the best one, or else starts from the beginning.
        A checkpoint that is not one of a step is first saved as one, so that the run can stop at any time. The number
        of ranks may differ from the saving run's: weights, optimiser and carried states are distributed anew.
        """
        if which == "last" and not self.checkpoints.steps():
            if not self.checkpoints.best.exists():
                return  # `fit` calls `begin`
            which = "best"
        place, device = (self._layout.place, "cpu") if self.ranks.several else (None, self.fabric.device)
        path, saved = self.checkpoints.load(which, device, place=place)
        self._require_own(saved, path)
        state = state_from_tensors(saved["state"], self.model)
        self.optimizer.load_state_dict(saved["optimizer"])  # a registered optimiser may refuse its state
        self.state = state
        self.model.load_state_dict(saved["model"])
        self.average.load_state_dict(self._resumed_average(saved))
        self.position = Position(**saved["position"])
        self.sums.load_state_dict(saved["window"], share=int(self.ranks.is_first))
        self.levels.load_state_dict(saved["levels"], self.ranks)
        self.scores = saved["scores"]
        if not self.ranks.from_first(self.checkpoints.best.exists()):  # killed after it was forgotten
            self.scores.pop("best", None)
        # A finished run has nothing to resume.
        self.resumed_at = [*saved["resumed_at"], *([] if self.finished else [self.position.step])]
        if self.ranks.is_first:
            self.folder.lock()
        states = saved["random"] if isinstance(saved["random"], list) else [saved["random"]]
        self._resume_random(states)
        self._resume_epoch()
        self._resume_best(saved["config"]["training"], len(states))
        if path not in self.checkpoints.steps():
            self.checkpoints.save(self.position.step, self.snapshot())
            self.checkpoints.finish()
        self.checkpoints.drop_after(self.position.step)

    def _require_own(self, saved: Payload, path: Path) -> None:
        """Refuse a checkpoint of another run, before anything changes, here or in the folder."""
        require_resumable(saved["config"], self.experiment)
        if (at := saved["position"]["step"]) > self.total_steps:
            got, expected = f"{self.total_steps} steps in all", f"at least {at}, which the run has already made"
            raise ValueError(sentence("the run's length (training.epochs, training.max_steps)", got, expected))
        if saved["data"] != self._data_fingerprint:
            got = f"{self.experiment.data.path}, which has changed since {path} was saved"
            hint = f"put it back, or start a new run from these weights with --init_from {self.folder.quoted}"
            raise ValueError(sentence("the corpus", got, "the data that the run was trained on", hint))
        if self.adapters is not None:
            self.adapters.require_base(saved["base"], path)
        require_fitting(self.model, saved["model"], path)

    def _resumed_average(self, saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The average so far; without it if averaging is to begin at another step than before, as in a longer run."""
        start, found = self.experiment.averaging.start_step, saved["average"]
        if found is None or saved["config"]["averaging"]["start_step"] == start:
            return found
        before = saved["config"]["averaging"]["start_step"]
        note = f"note: averaging.start_step was {before} and is {start}: what was averaged until now is left out"
        self._notes.append(note)
        return None

    def _resume_best(self, trained: Mapping[str, Any], n_ranks: int) -> None:
        """Remove a best checkpoint of a later step or take over its score, unless the run will come to it again."""
        is_as_long = all(trained.get(name) == getattr(self.config, name) for name in ("epochs", "max_steps"))
        every = trained.get("eval_every")  # None: after each epoch, which has other steps on other ranks
        is_scored_alike = every == self.config.eval_every and (every is not None or n_ranks == self.ranks.count)
        if is_as_long and is_scored_alike:
            return
        is_later, score = self.ranks.from_first(self._later_best() if self.ranks.is_first else None)
        if is_later and is_as_long and score is not None:
            self.scores["best"] = score
        elif is_later:
            self.scores.pop("best", None)
            if self.ranks.is_first:
                discard(self.checkpoints.best)

    def _later_best(self) -> tuple[bool, Any]:
        """Say whether the best checkpoint is of a later step, and its score; one that is damaged has none."""
        if not self.checkpoints.best.exists():
            return False, None
        try:
            best = load_checkpoint(self.checkpoints.best)
        except CheckpointError as error:
            self._notes.append(f"note: the best checkpoint cannot be read and is removed: {error}")
            return True, None
        return best["position"]["step"] > self.position.step, best["scores"].get("best")

    def _resume_random(self, states: list[Any]) -> None:
        """Continue the random numbers of this rank; with another number of ranks there are others, and a note."""
        if self.ranks.rank < len(states):
            _set_random_state(states[self.ranks.rank])
        else:
            reseed(self.config, self.ranks.rank + self.position.step * self.ranks.count)
        has_dropout = any(getattr(part, "p", 0) for part in self.model.modules() if "Drop" in type(part).__name__)
        if len(states) != self.ranks.count and has_dropout:
            self._notes.append(
                f"note: saved by {len(states)} ranks and resumed by {self.ranks.count}: "
                "dropout draws other numbers from here on"
            )

    def _resume_epoch(self) -> None:
        """Go on with the next epoch if this one has no more batches here, and say so if epochs have another length."""
        at = self.position
        if at.batch >= len(self.source):
            at.epoch, at.batch, self.state = at.epoch + 1, 0, None
        if at.step != at.epoch * self.steps_per_epoch + math.ceil(at.batch / self.config.accumulate):
            self._notes.append(
                f"note: epochs have {self.steps_per_epoch} updates here, another number before step {at.step}: "
                f"the run ends after {self.total_steps}, wherever in an epoch that is"
            )

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end, or `training.patience` or `training.stop_at` has ended it."""
        if self.position.step >= self.total_steps:
            return True
        if self.config.patience is not None and self._since_best >= self.config.patience:
            return True
        best, enough = self.scores.get("best"), self.config.stop_at
        if best is None or enough is None:
            return False
        return bool(best["accuracy"] >= enough if self.config.monitor == "accuracy" else best["loss"] <= enough)

    @property
    def _since_best(self) -> int:
        """How many evaluations in a row were no better than the best."""
        return int(self.scores["last"]["since_best"]) if {"last", "best"} <= self.scores.keys() else 0
