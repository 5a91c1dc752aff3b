"""What a run is told about optimising, scheduling and book-keeping: one field a decision, checked where it
is made.

Every config refuses impossible values when it is made, with the field's full name as a recipe spells it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


def require(holds: bool, field: str, allowed: str, value: object) -> None:
    """Raise a ValueError that names the field, what is allowed and what came, unless `holds`."""
    if not holds:
        raise ValueError(f"{field} must be {allowed}, got {value!r}")


def chosen_options(
    config: object, section: str, choice: str, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The options of what was chosen, those that were not set with their defaults; those of other choices are refused.

    Args:
        config: has the choice and every option as a field; an option that was not set is None.
        section: where a recipe has them.
        choice: the field that chooses.
        options: the options of each choice, with their defaults.

    Raises:
        ValueError: the choice is unknown, or an option is set that it does not have.
    """
    chosen = getattr(config, choice)
    require(chosen in options, f"{section}.{choice}", "one of " + ", ".join(options), chosen)
    for field in dict.fromkeys(name for names in options.values() for name in names):
        if field not in options[chosen]:
            value = getattr(config, field)
            require(value is None, f"{section}.{field}", f"left out where {section}.{choice} is {chosen}", value)
    given = {field: getattr(config, field) for field in options[chosen]}
    return {field: options[chosen][field] if value is None else value for field, value in given.items()}


OPTIMIZER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.9, 0.98), "epsilon": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False},
}


@dataclass
class OptimizerConfig:
    """An optimiser, with a rule of its own for the parameters that make the state transition."""

    algorithm: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or stochastic gradient descent with momentum."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] | None = None
    """adamw: the decay rates of the first and the second moment, each in [0, 1); null: 0.9 and 0.98."""
    epsilon: float | None = None
    """adamw: the term in the denominator, > 0; null: 1e-8."""
    momentum: float | None = None
    """sgd: how much of the last update enters the next one, in [0, 1); null: 0.9."""
    nesterov: bool | None = None
    """sgd: look ahead by the momentum (Nesterov); null: false."""
    weight_decay: float = 0.05
    """Weight decay of matrices (embeddings among them); biases and norm scales have none. adamw: decoupled from the
    gradient; sgd: added to it, as an L2 penalty is."""
    transition_learning_rate: float | None = None
    """Peak learning rate of the transition's parameters; null: the same as of all others."""
    transition_weight_decay: float | None = None
    """Weight decay of the transition's parameters; null: by the same rule as for all others."""
    gradient_clip: float | None = None
    """Largest norm of the whole gradient, > 0; a longer one is scaled down to it. Null: never."""

    def __post_init__(self) -> None:
        name = "optimizer."
        options = self.options
        require(self.learning_rate > 0, name + "learning_rate", "greater than 0", self.learning_rate)
        betas, momentum = options.get("betas", ()), options.get("momentum", 0.0)
        require(all(0 <= b < 1 for b in betas), name + "betas", "two numbers in [0, 1)", betas)
        require(0 <= momentum < 1, name + "momentum", "in [0, 1)", momentum)
        require(not self.nesterov or momentum > 0, name + "nesterov", "false without a momentum", self.nesterov)
        require(self.weight_decay >= 0, name + "weight_decay", "0 or more", self.weight_decay)
        for field in ("epsilon", "transition_learning_rate", "gradient_clip"):
            value = getattr(self, field)
            require(value is None or value > 0, name + field, "greater than 0, or null", value)
        decay = self.transition_weight_decay
        require(decay is None or decay >= 0, name + "transition_weight_decay", "0 or more, or null", decay)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the algorithm, with their defaults where they were not set."""
        return chosen_options(self, "optimizer", "algorithm", OPTIMIZER_OPTIONS)


SCHEDULE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cosine": {"final_fraction": 0.0},
    "steps": {"steps": (), "factor": 0.1},
}


@dataclass
class ScheduleConfig:
    """The learning rate over a run: a linear warm-up, then a fall."""

    shape: Literal["cosine", "steps"] = "cosine"
    """How it falls: along a cosine that ends with the run, or in steps at the ends of some epochs."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises from 0 to its peak."""
    final_fraction: float | None = None
    """cosine: where it ends, as a fraction of the peak, in [0, 1]; null: 0."""
    steps: list[int] | None = None
    """steps: the numbers of epochs after which the learning rate falls, increasing, each 1 or more."""
    factor: float | None = None
    """steps: what each multiplies the learning rate by, in (0, 1); null: 0.1."""

    def __post_init__(self) -> None:
        options = self.options
        require(self.warmup_steps >= 0, "schedule.warmup_steps", "0 or more", self.warmup_steps)
        final, factor = options.get("final_fraction", 0.0), options.get("factor", 0.5)
        require(0 <= final <= 1, "schedule.final_fraction", "between 0 and 1", final)
        require(0 < factor < 1, "schedule.factor", "between 0 and 1", factor)
        if "steps" in options:
            steps = options["steps"]
            rising = bool(steps) and list(steps) == sorted(set(steps)) and steps[0] >= 1
            require(rising, "schedule.steps", "increasing numbers of epochs, such as [11, 14]", self.steps)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the shape, with their defaults where they were not set."""
        return chosen_options(self, "schedule", "shape", SCHEDULE_OPTIONS)


@dataclass
class AveragingConfig:
    """The average of the weights over the updates, which is then what is evaluated and kept as the best."""

    start_step: int | None = None
    """The update after which averaging begins; null: no average."""
    decay: float | None = None
    """Weight of the old average against the new weights, in (0, 1), for an exponential moving average; null:
    the plain mean of the weights after every update, as in averaged SGD."""

    def __post_init__(self) -> None:
        start, decay = self.start_step, self.decay
        require(start is None or start >= 0, "averaging.start_step", "0 or more, or null", start)
        require(decay is None or 0 < decay < 1, "averaging.decay", "between 0 and 1, or null", decay)


@dataclass
class TrainingConfig:
    """How long a run is, how it is computed, and when it logs, evaluates and saves.

    A step is one update of the weights. A cosine of the schedule ends where the run ends.
    """

    epochs: int = 1
    """Passes over the training data."""
    max_steps: int | None = None
    """End of the run in updates, where that comes before the end of the last epoch; null: no such end."""
    accumulate: int = 1
    """Batches whose gradients make up one update; every counted target weighs the same in it."""
    carry_state: bool = True
    """Carry the state, its gradients cut, into a batch that goes on where the last one ended; false:
    never."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """float32 throughout, or bfloat16 autocast over float32 weights and states. Evaluation is in float32."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: the first CUDA device, else the CPU."""
    threads: int | None = None
    """CPU threads; null: as many as PyTorch chooses."""
    deterministic: bool = False
    """Refuse operations whose result may differ from run to run on the same machine."""
    seed: int = 0
    """Seed of the weights' initial values and of dropout; the data's order has its own."""
    log_every: int = 50
    """Steps between two rows of the log; a row's loss is the mean over all targets since the last one."""
    eval_every: int | None = None
    """Steps between two evaluations on the validation split; null: one at the end of each epoch."""
    save_every: int | None = None
    """Steps between two checkpoints; null: one at the end of each epoch."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep, 2 or more (one may turn out damaged); the best one
    stays."""
    monitor: Literal["loss", "accuracy"] = "loss"
    """Which validation score makes a checkpoint the best one."""
    tensorboard: bool = True
    """Write TensorBoard events beside the CSV log."""

    def n_steps(self, n_batches: int) -> tuple[int, int]:
        """Updates in an epoch of so many batches, and in the whole run."""
        steps_per_epoch = math.ceil(n_batches / self.accumulate)
        total = self.epochs * steps_per_epoch
        return steps_per_epoch, total if self.max_steps is None else min(total, self.max_steps)

    def __post_init__(self) -> None:
        for field in ("epochs", "accumulate", "log_every"):
            value = getattr(self, field)
            require(value >= 1, f"training.{field}", "1 or more", value)
        for field in ("max_steps", "threads", "eval_every", "save_every"):
            value = getattr(self, field)
            require(value is None or value >= 1, f"training.{field}", "1 or more, or null", value)
        require(self.keep_checkpoints >= 2, "training.keep_checkpoints", "2 or more", self.keep_checkpoints)
        require(0 <= self.seed < 2**32, "training.seed", "in 0..2**32 - 1", self.seed)
        for field, allowed in (
            ("precision", ("32-true", "bf16-mixed")),
            ("accelerator", ("auto", "cpu", "cuda")),
            ("monitor", ("loss", "accuracy")),
        ):
            value = getattr(self, field)
            require(value in allowed, f"training.{field}", "one of " + ", ".join(allowed), value)
