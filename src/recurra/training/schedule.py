"""The learning rate as a pure function of the step: nothing to save, and nothing that can drift when a run resumes."""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch.optim import Optimizer

from recurra.data import BatchSource
from recurra.training.config import ScheduleConfig


@runtime_checkable
class HasRelativeLengths(Protocol):
    """Data whose training steps have drawn lengths."""

    def relative_length(self, epoch: int, step: int) -> float:
        """Return the length of a step over the usual one."""
        ...


def learning_rate_factor(step: int, total_steps: int, config: ScheduleConfig, *, steps_per_epoch: int = 1) -> float:
    """Compute the learning rate at an update, as a fraction of its peak.

    During the warm-up the fraction rises linearly from 1/warmup_steps to 1. Then it follows half a cosine that reaches
    `final_fraction` at `total_steps`; or, with steps, it is `factor` to the power of how many of the epochs in `steps`
    have ended; or, with wsd, it stays at 1 and falls along a line to `final_fraction` over the last `decay_fraction` of
    all updates (Hu et al., "MiniCPM", 2024; after the warm-up, if that leaves fewer). A run that ends during its
    warm-up stays on the line.

    Args:
        step: the number of the update, from 0.
        total_steps: updates in the whole run.
        config: the warm-up and the decay.
        steps_per_epoch: updates in an epoch; only used with steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    options = config.options
    if config.shape == "steps":
        n_drops = sum(step >= epoch * steps_per_epoch for epoch in options["steps"])
        return float(options["factor"] ** n_drops)
    floor: float = options["final_fraction"]
    after_warmup = max(1, total_steps - config.warmup_steps)
    if config.shape == "wsd":
        decay_steps = min(after_warmup, max(1, round(options["decay_fraction"] * total_steps)))
        left = min(1.0, max(0, total_steps - step) / decay_steps)
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - config.warmup_steps) / after_warmup)))
    return floor + (1.0 - floor) * left


def mean_relative_length(source: BatchSource, epoch: int, steps: Sequence[int]) -> float:
    """Return how long the batches of an update are beside the usual ones; 1 for data whose lengths are not drawn.

    Learning rates are scaled by it (Merity et al., 2017): a short step would otherwise count as much as a long one.
    """
    if not isinstance(source, HasRelativeLengths):
        return 1.0
    return sum(source.relative_length(epoch, step) for step in steps) / len(steps)


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Set the learning rate of each parameter group to `factor` times its `peak_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]


def warm_up_note(total_steps: int, config: ScheduleConfig) -> str:
    """Point out a run that ends inside its warm-up; empty for any other."""
    if total_steps > config.warmup_steps:
        return ""
    return f"note: all {total_steps} steps of this run are in its warm-up (schedule.warmup_steps {config.warmup_steps})"
