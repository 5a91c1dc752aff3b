"""The learning rate as a pure function of the step: nothing to save, nothing that can drift on resuming."""

import math

from torch.optim import Optimizer

from recurra.training.config import ScheduleConfig


def learning_rate_factor(step: int, total_steps: int, config: ScheduleConfig, *, steps_per_epoch: int = 1) -> float:
    """The fraction of the peak learning rate at an update.

    Linear from 1/warmup_steps to 1 over the warm-up, then half a cosine that reaches `final_fraction` at
    `total_steps`, or, in steps, `factor` to the power of how many of the epochs `steps` have ended. A run that ends
    inside its warm-up never leaves the line.

    Args:
        step: the update's number, from 0.
        total_steps: updates in the whole run.
        config: the warm-up, and how the rate falls.
        steps_per_epoch: updates in an epoch; a cosine knows no epochs.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    options = config.options
    if config.shape == "steps":
        n_falls = sum(step >= epoch * steps_per_epoch for epoch in options["steps"])
        return float(options["factor"] ** n_falls)
    floor: float = options["final_fraction"]
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return floor + (1.0 - floor) * cosine


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Set each parameter group's learning rate to `factor` times its `peak_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]
