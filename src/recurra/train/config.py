"""How a run optimises, schedules its learning rate and keeps its books: one field per decision."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from torch.optim import SGD, AdamW, Optimizer

from recurra.checks import (
    choose,
    fields_of,
    require,
    require_at_least,
    require_literal_fields,
    require_number,
    require_positive,
    require_probability,
    require_whole_number,
    sentence,
)
from recurra.registry import Registry
from recurra.train._muon import Muon


def _soap(
    groups: Iterable[dict[str, Any]],
    *,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    precondition_frequency: int = 5,
) -> Optimizer:
    """Make SOAP (Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024) over parameter groups."""
    from pytorch_optimizer import SOAP

    groups = list(groups)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if parameter.is_complex():
            got = f"a parameter of {parameter.dtype} and shape {tuple(parameter.shape)}"
            raise ValueError(sentence("optimizer.algorithm soap", got, "real parameters"))
        if hasattr(parameter, "device_mesh"):  # its statistics need whole gradients
            raise ValueError(sentence("training.strategy", "fsdp", "ddp with optimizer.algorithm soap"))
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
    # A side of a matrix with more rows or columns than 1024, such as a vocabulary, keeps its own basis.
    return SOAP(groups, precondition_frequency=precondition_frequency, max_precondition_dim=1024, **options)


_Factory = TypeVar("_Factory", bound=Callable[..., Optimizer])

_optimizers: Registry[Callable[..., Optimizer]] = Registry("optimizer")


def register_optimizer(name: str) -> Callable[[_Factory], _Factory]:
    """Register an optimiser under `name`, for `optimizer.algorithm`.

    It is called as `cls(groups, lr=..., **optimizer.own_options)` with the groups of `parameter_groups`: each has its
    own `lr`, which the schedule changes, and `weight_decay`. Its `state_dict` goes into the checkpoints.
    """
    return _optimizers.register(name)  # type: ignore[return-value]


def list_optimizers() -> list[str]:
    """List the names of all registered optimisers."""
    return list(_optimizers)


def optimizer_factory(name: str, options: dict[str, Any]) -> Callable[..., Optimizer]:
    """Return what makes the optimiser of a name, once it is known to take `options`."""
    factory = _optimizers[name]
    parameters = inspect.signature(factory).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        allowed = [parameter.name for parameter in [*parameters][1:] if parameter.name != "lr"]  # without the groups
        if unknown := [option for option in options if option not in allowed]:
            got = f"options with {unknown[0]!r} for {name}"
            raise ValueError(sentence("optimizer.own_options", got, f"some of {', '.join(allowed)}"))
    return factory


register_optimizer("adamw")(partial(AdamW, fused=True))
register_optimizer("sgd")(partial(SGD, fused=True))
register_optimizer("muon")(Muon)
register_optimizer("soap")(_soap)


# Every config checks itself when it is made and refuses impossible values, naming the field as a recipe spells it.


def _chosen_options(
    config: object, section: str, choice: str, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the options of the choice that a config makes, with defaults for those that are not set."""
    chosen = getattr(config, choice)
    defaults = choose(f"{section}.{choice}", options, chosen)
    others = dict.fromkeys(name for names in options.values() for name in names if name not in defaults)
    for name, value in fields_of(config, section, *others).items():
        require(False, name, value, f"null when {section}.{choice} is {chosen}", "omit it")
    given = {field: getattr(config, field) for field in defaults}
    return {field: defaults[field] if value is None else value for field, value in given.items()}


OPTIMIZER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.9, 0.98), "epsilon": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "muon": {"matrix_learning_rate": 0.01, "momentum": 0.95, "nesterov": True, "betas": (0.9, 0.98), "epsilon": 1e-8},
    "soap": {"betas": (0.95, 0.95), "epsilon": 1e-8, "precondition_frequency": 5},
}


@dataclass
class OptimizerConfig:
    """An optimiser, with a separate learning rate and weight decay for the parameters of the state transition."""

    algorithm: str = "adamw"
    """adamw; sgd: stochastic gradient descent with momentum; muon: Muon for the matrices between hidden channels and
    AdamW for everything else; soap: Adam in the eigenvectors of Shampoo's statistics (needs `recurra[optimizers]`); or
    the name of your own optimiser (`register_optimizer`)."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    matrix_learning_rate: float | None = None
    """muon: peak learning rate of the matrices between hidden channels; null: 0.01."""
    betas: tuple[float, float] | None = None
    """adamw, muon, soap: the decay rates of the first and the second moment, each in [0, 1); null: 0.9 and 0.98, and
    0.95 for both with soap."""
    epsilon: float | None = None
    """adamw, muon, soap: the term in the denominator, above 0; null: 1e-8."""
    momentum: float | None = None
    """sgd, muon: share of the last update that enters the next one, in [0, 1); null: 0.9 for sgd and 0.95 for muon."""
    nesterov: bool | None = None
    """sgd, muon: use Nesterov momentum; null: false for sgd and true for muon."""
    precondition_frequency: int | None = None
    """soap: updates between two changes of its basis, at least 1; null: 5."""
    own_options: dict[str, Any] = field(default_factory=dict)
    """Options of your own optimiser, by the names of its arguments."""
    weight_decay: float = 0.05
    """Weight decay of matrices, embeddings included; biases, skip weights (Mamba's D), norm scales and the transition
    have none. adamw and muon decouple it from the gradient; sgd adds it to the gradient, as an L2 penalty does."""
    transition_learning_rate: float | None = None
    """Peak learning rate of the transition's parameters; null: the same as for all others."""
    parameter_learning_rates: dict[str, float] = field(default_factory=dict)
    """Peak learning rates by patterns of parameter names, such as {"*.transition.*bias": 0.001}. They take precedence
    over the rates above, and later patterns over earlier ones."""
    transition_weight_decay: float = 0.0
    """Weight decay of the transition's matrices: 0 by default, because decay pulls time scales towards 1."""
    gradient_clip: float | None = None
    """Maximum norm of the whole gradient, above 0; larger gradients are scaled down to it. Null: no limit."""

    def __post_init__(self) -> None:
        rates = ("learning_rate", "matrix_learning_rate", "epsilon", "transition_learning_rate", "gradient_clip")
        require_positive(**fields_of(self, "optimizer", *rates))
        for pattern, rate in self.parameter_learning_rates.items():
            require_positive(**{f"optimizer.parameter_learning_rates[{pattern!r}]": rate})
        require_at_least(0, **fields_of(self, "optimizer", "weight_decay", "transition_weight_decay"))
        require_at_least(1, **fields_of(self, "optimizer", "precondition_frequency"))
        options = {name: value for name, value in self.options.items() if name not in self.own_options}
        betas, momentum = options.get("betas", ()), options.get("momentum", 0.0)
        require(isinstance(betas, (tuple, list)), "optimizer.betas", betas, "two numbers in [0, 1)")
        require_number(**{f"optimizer.betas[{n}]": beta for n, beta in enumerate(betas)})
        require(all(0 <= beta < 1 for beta in betas), "optimizer.betas", betas, "two numbers in [0, 1)")
        require_probability(**{"optimizer.momentum": momentum})
        require(not self.nesterov or momentum > 0, "optimizer.nesterov", self.nesterov, "false without momentum")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the algorithm, with defaults for those that are not set."""
        known = {name: OPTIMIZER_OPTIONS.get(name, {}) for name in list_optimizers()}
        chosen = _chosen_options(self, "optimizer", "algorithm", known)
        own = self.algorithm not in OPTIMIZER_OPTIONS
        got, expected = self.own_options, f"none when optimizer.algorithm is {self.algorithm}"
        require(own or not got, "optimizer.own_options", got, expected)
        return {**chosen, **self.own_options}


_SCHEDULE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cosine": {"final_fraction": 0.0},
    "steps": {"steps": (), "factor": 0.1},
    "wsd": {"decay_fraction": 0.1, "final_fraction": 0.0},
}


@dataclass
class ScheduleConfig:
    """The learning rate over a run: a linear warm-up, then a decay."""

    shape: Literal["cosine", "steps", "wsd"] = "cosine"
    """How the learning rate decays: along a cosine over the whole run, in steps at the end of some epochs, or, for
    wsd (warm-up, stable, decay), linearly over only the last updates of the run."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises from 0 to its peak."""
    final_fraction: float | None = None
    """cosine, wsd: the last learning rate as a fraction of the peak, in [0, 1]; null: 0."""
    decay_fraction: float | None = None
    """wsd: the share of the run's updates over which the rate falls, in (0, 1]; null: 0.1."""
    steps: list[int] | None = None
    """steps: the epochs after which the learning rate drops, counted from 1, in increasing order."""
    factor: float | None = None
    """steps: each drop multiplies the learning rate by this factor, in (0, 1); null: 0.1."""

    def __post_init__(self) -> None:
        options = self.options
        require_whole_number(0, **fields_of(self, "schedule", "warmup_steps"))
        require_number(**fields_of(self, "schedule", "final_fraction", "decay_fraction", "factor"))
        final, factor = options.get("final_fraction", 0.0), options.get("factor", 0.5)
        require(0 <= final <= 1, "schedule.final_fraction", final, "a fraction in [0, 1]")
        require(0 < factor < 1, "schedule.factor", factor, "a factor in (0, 1)")
        decay = options.get("decay_fraction", 0.5)
        require(0 < decay <= 1, "schedule.decay_fraction", decay, "a fraction in (0, 1]")
        if "steps" in options:
            steps = options["steps"]
            rising = bool(steps) and list(steps) == sorted(set(steps)) and steps[0] >= 1
            require(rising, "schedule.steps", self.steps, "increasing numbers of epochs, such as [11, 14]")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the shape, with defaults for those that are not set."""
        return _chosen_options(self, "schedule", "shape", _SCHEDULE_OPTIONS)


@dataclass
class AveragingConfig:
    """An average of the weights over the updates; evaluation and the best checkpoint then use the average."""

    start_step: int | None = None
    """Averaging begins after this update; null: no averaging."""
    decay: float | None = None
    """For an exponential moving average: the weight of the old average against the new weights, in (0, 1). Null: the
    plain mean of the weights after each update, as in averaged SGD."""

    def __post_init__(self) -> None:
        require_whole_number(0, **fields_of(self, "averaging", "start_step"))
        decay = self.decay
        require_number(**fields_of(self, "averaging", "decay"))
        require(decay is None or 0 < decay < 1, "averaging.decay", decay, "a weight in (0, 1), or null")
        begins = self.start_step is not None
        require(decay is None or begins, "averaging.decay", decay, "null without averaging.start_step", "set that, too")


@dataclass
class TrainingConfig:
    """How long a run lasts, how it computes, and when it logs, evaluates and saves.

    A step is one update of the weights. A cosine schedule ends where the run ends.
    """

    epochs: int = 1
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many updates, if that comes before the end of the last epoch; null: train all epochs."""
    accumulate: int = 1
    """Number of batches per update; every counted target has the same weight in it."""
    carry_state: bool = True
    """Carry the detached state into a batch that continues the last one; false: never."""
    activation_penalty: float = 0.0
    """Weight of the mean square of a language model's head input (AWD-LSTM's AR); logs exclude it."""
    change_penalty: float = 0.0
    """Weight of the mean square of the head input's change between steps (AWD-LSTM's TAR)."""
    balance_penalty: float = 0.0
    """Weight of the load-balancing loss of a language model's mixtures of experts; logs exclude it."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """float32 throughout, or bfloat16 autocast with float32 weights and states. auto: bfloat16 if the processor
    supports it in hardware, otherwise float32; a resumed run keeps the choice. Evaluation always uses float32."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: the first CUDA device, or the CPU if there is none."""
    threads: int | None = None
    """CPU threads; null: as many as PyTorch chooses."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun, each rank has a copy of the model (ddp) or a shard of every parameter and its optimiser state
    (fsdp); auto: ddp. A single process has the whole model."""
    sequence_parallel: int = 1
    """Number of ranks that share a sequence: each computes one consecutive piece. Must divide the number of ranks."""
    asynchronous_saving: bool = False
    """With several ranks, write checkpoints from a copy in memory while training continues."""
    checkpoint_blocks: bool = False
    """Activation checkpointing: store each block's input and recompute the rest in the backward pass. Saves memory and
    costs one more forward pass."""
    deterministic: bool = False
    """Refuse operations with results that may differ between runs on the same machine."""
    seed: int = 0
    """Seed of the initial weights and of dropout; the order of the data has its own seed."""
    log_every: int = 50
    """Steps between log records; a record's loss is the mean over all targets since the last record."""
    eval_every: int | None = None
    """Steps between evaluations on the validation split; null: one at the end of each epoch."""
    save_every: int | None = None
    """Steps between checkpoints; null: one at the end of each epoch."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep, at least 2 in case one is damaged; the best one is always kept."""
    monitor: Literal["loss", "accuracy"] = "loss"
    """The validation score that determines the best checkpoint; equal accuracies are ranked by loss."""
    tensorboard: bool = True
    """Write TensorBoard events in addition to the JSON log."""
    patience: int | None = None
    """Stop after this many evaluations in a row without improvement; null: never."""
    graphs: Literal["auto", "off", "on"] = "off"
    """Replay each update, and the batches of evaluations, as one CUDA graph per shape. auto: on one CUDA device, unless
    the model waits for it within an update; on: refuse to train without. Off by default: not yet tested on a GPU."""
    compile: bool = False
    """Compile the model with torch.compile: the first steps take minutes, and new lengths recompile."""
    stop_at: float | None = None
    """Stop when the validation score named by `monitor` reaches this value: at most this loss, or at least this
    accuracy; null: never."""

    def __post_init__(self) -> None:
        counts = ("epochs", "accumulate", "log_every", "max_steps", "threads", "eval_every", "save_every")
        require_whole_number(1, **fields_of(self, "training", *counts, "sequence_parallel"))
        require_whole_number(2, **fields_of(self, "training", "keep_checkpoints"))
        require_whole_number(1, **fields_of(self, "training", "patience"))
        highest, expected = (1, "in (0, 1]") if self.monitor == "accuracy" else (math.inf, "above 0")
        require_number(**fields_of(self, "training", "stop_at"))
        is_possible = self.stop_at is None or 0 < self.stop_at <= highest
        require(is_possible, "training.stop_at", self.stop_at, f"{self.monitor} {expected}, or null")
        require_at_least(0, **fields_of(self, "training", "activation_penalty", "change_penalty", "balance_penalty"))
        for name, expected in {
            "change_penalty": "0 with training.sequence_parallel, which cuts sequences where it would compare steps",
            "checkpoint_blocks": "false with training.sequence_parallel, whose exchanges cannot be repeated",
            "compile": "false with training.sequence_parallel, whose exchanges cannot be compiled",
        }.items():
            value = getattr(self, name)
            require(self.sequence_parallel == 1 or not value, f"training.{name}", value, expected)
        require_whole_number(0, **{"training.seed": self.seed})
        require(self.seed < 2**32, "training.seed", self.seed, "a whole number from 0 to 2**32 - 1")
        require_literal_fields(self, "training")

    def n_steps(self, n_batches: int) -> tuple[int, int]:
        """Count the updates in an epoch of `n_batches` batches, and in the whole run."""
        steps_per_epoch = math.ceil(n_batches / self.accumulate)
        total = self.epochs * steps_per_epoch
        return steps_per_epoch, total if self.max_steps is None else min(total, self.max_steps)
