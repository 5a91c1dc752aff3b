"""What a run is told about optimising, scheduling and book-keeping: one field a decision, checked where it
is made.

Every config refuses impossible values when it is made, with the field's full name as a recipe spells it.
"""

from dataclasses import dataclass
from typing import Literal


def require(holds: bool, field: str, allowed: str, value: object) -> None:
    """Raise a ValueError that names the field, what is allowed and what came, unless `holds`."""
    if not holds:
        raise ValueError(f"{field} must be {allowed}, got {value!r}")


@dataclass
class OptimizerConfig:
    """AdamW, with a rule of their own for the parameters that make the state transition."""

    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates of the first and the second moment, each in [0, 1)."""
    epsilon: float = 1e-8
    """AdamW's term in the denominator, > 0."""
    weight_decay: float = 0.05
    """Decoupled weight decay of matrices (embeddings among them); biases and norm scales have none."""
    transition_learning_rate: float | None = None
    """Peak learning rate of the transition's parameters; null: the same as of all others."""
    transition_weight_decay: float | None = None
    """Weight decay of the transition's parameters; null: by the same rule as for all others."""
    gradient_clip: float | None = None
    """Largest norm of the whole gradient, > 0; a longer one is scaled down to it. Null: never."""

    def __post_init__(self) -> None:
        name = "optimizer."
        require(self.learning_rate > 0, name + "learning_rate", "greater than 0", self.learning_rate)
        require(all(0 <= b < 1 for b in self.betas), name + "betas", "two numbers in [0, 1)", self.betas)
        require(self.epsilon > 0, name + "epsilon", "greater than 0", self.epsilon)
        require(self.weight_decay >= 0, name + "weight_decay", "0 or more", self.weight_decay)
        for field in ("transition_learning_rate", "gradient_clip"):
            value = getattr(self, field)
            require(value is None or value > 0, name + field, "greater than 0, or null", value)
        decay = self.transition_weight_decay
        require(decay is None or decay >= 0, name + "transition_weight_decay", "0 or more, or null", decay)


@dataclass
class ScheduleConfig:
    """The learning rate over a run: a linear warm-up, then a cosine down to a floor."""

    warmup_steps: int = 0
    """Updates over which the learning rate rises from 0 to its peak."""
    final_fraction: float = 0.0
    """Where the cosine ends, as a fraction of the peak, in [0, 1]."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "schedule.warmup_steps", "0 or more", self.warmup_steps)
        final = self.final_fraction
        require(0 <= final <= 1, "schedule.final_fraction", "between 0 and 1", final)


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

    A step is one update of the weights. The cosine of the schedule ends where the run ends.
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
