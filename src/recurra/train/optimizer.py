"""Optimisers over parameter groups that follow from rules, the learning rate over time, and averaged weights."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recurra._process import is_first_launched
from recurra.checks import sentence
from recurra.train._muon import matrix_ids
from recurra.train.config import OPTIMIZER_OPTIONS, AveragingConfig, OptimizerConfig, ScheduleConfig, optimizer_factory


def learning_rate_factor(step: int, total_steps: int, config: ScheduleConfig, *, steps_per_epoch: int = 1) -> float:
    """Compute the learning rate at an update, as a fraction of its peak.

    During the warm-up, the fraction rises linearly from 1/warmup_steps to 1. Then it follows half a cosine that reaches
    `final_fraction` at `total_steps`. With steps, it is `factor` to the power of the number of epochs in `steps` that
    have ended. With wsd, it stays at 1 and falls linearly to `final_fraction` over the last `decay_fraction` of all
    updates (Hu et al., "MiniCPM", 2024), or over those after the warm-up if they are fewer. A run that ends during its
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


class WeightAverage:
    """Keeps the average of a model's weights, for evaluation: a mean (averaged SGD) or an exponential moving average.

    shard: distributes a copy of the model over the ranks in the same way as the model itself, which can no longer be
    copied once it is distributed.
    """

    def __init__(
        self, model: nn.Module, config: AveragingConfig, *, shard: Callable[[nn.Module], nn.Module] | None = None
    ) -> None:
        self.config = config
        self._model = model
        self._average: AveragedModel | None = None
        self._prepared: AveragedModel | None = None
        if shard is not None and config.start_step is not None:
            self._prepared = self._copy()
            shard(self._prepared.module)

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights, or the model in training if averaging has not begun."""
        return self._model if self._average is None else self._average.module

    def update(self, step: int) -> None:
        """Add the weights after update number `step`, counted from 1, to the average."""
        if self.config.start_step is None or step <= self.config.start_step:
            return
        if self._average is None:
            self._average = self._prepared or self._copy()
        # After a forward pass FSDP keeps the outermost module's weights whole, until a backward pass that never comes.
        if (reshard := getattr(self._average.module, "reshard", None)) is not None:
            reshard()
        self._average.update_parameters(self._model)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the average as plain data; None if averaging has not begun."""
        if self._average is None:
            return None
        return {"weights": self._average.module.state_dict(), "n_averaged": int(self._average.n_averaged)}

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from the result of `state_dict`."""
        self._average = None
        if saved is None:
            return
        self._average = self._prepared or self._copy()
        self._average.module.load_state_dict(saved["weights"])
        self._average.n_averaged.fill_(saved["n_averaged"])

    def _copy(self) -> AveragedModel:
        decay = self.config.decay
        # Buffers, such as a Neumann-Cayley inverse, belong to the weights of one step: they are copied, not averaged.
        return AveragedModel(self._model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, precision: str = "32-true") -> Optimizer:
    """Build the optimiser of `config.algorithm` over `parameter_groups`.

    AdamW and SGD are fused, with one pass over each parameter, on the CPU and on a GPU. `precision` is
    `training.precision`: with bf16-mixed, Muon's products are in bfloat16, like those of the model.

    Raises:
        ValueError: there is no such optimiser, or it has no such option.
    """
    groups = parameter_groups(model, config)
    options = config.options
    if config.algorithm in OPTIMIZER_OPTIONS:
        options = {"eps" if name == "epsilon" else name: value for name, value in options.items()}
        options.pop("matrix_learning_rate", None)  # the groups have it
    if config.algorithm == "muon":
        options["bfloat16"] = precision == "bf16-mixed"
    return optimizer_factory(config.algorithm, options)(groups, lr=config.learning_rate, **options)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Sort the trainable parameters of `model` into groups with the same learning rate and weight decay.

    Tensors with two or more dimensions decay, including embeddings; biases, skip weights and norm scales do not. Nor do
    the parameters of the state transition, as in the code of Mamba, S4 and H3 and in GateLoop Table 4, unless
    `transition_weight_decay` is set; each module lists them in a method `transition_parameters()`.

    Each group has the keys `name`, `params`, `lr`, `peak_lr` (which a schedule scales), `weight_decay` and, for Muon,
    `orthogonal`. Tied parameters count once, under their first name.

    Raises:
        ValueError: a pattern fits no parameter, or a module names one that the model does not have.
    """
    transition = _transition_parameter_ids(model)
    for name in () if transition else ("transition_learning_rate", "transition_weight_decay"):
        if getattr(config, name) and is_first_launched():
            lacks = "the model has no parameters that make a state transition"
            warnings.warn(f"optimizer.{name} is not used: {lacks}", stacklevel=1)
    muon = config.algorithm == "muon"
    matrices = matrix_ids(model) - transition if muon else set()
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    patterns = _fitting_patterns([name for name, _ in trainable], config)
    members: dict[tuple[str, float, float, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter_name, parameter in trainable:
        name, rate, decay = "base", config.learning_rate, config.weight_decay
        if id(parameter) in transition:
            name, rate = "transition", config.transition_learning_rate or rate
            decay = config.transition_weight_decay
        if not _is_weight(parameter_name, parameter):
            decay = 0.0
        if id(parameter) in matrices:
            name, rate = "matrices", config.options["matrix_learning_rate"]
        if parameter_name in patterns:
            name = patterns[parameter_name]
            rate = config.parameter_learning_rates[name]
        members[name, rate, decay, id(parameter) in matrices].append(parameter)
    return [
        {
            "name": f"{name}, weight decay {decay:g}",
            "params": p,
            "lr": rate,
            "peak_lr": rate,
            "weight_decay": decay,
            **({"orthogonal": orthogonal} if muon else {}),
        }
        for (name, rate, decay, orthogonal), p in members.items()
    ]


def _is_weight(name: str, parameter: nn.Parameter) -> bool:
    """Tell a matrix from a bias, a skip weight or a scale; a bias may have a row for every head."""
    return parameter.ndim >= 2 and not name.rpartition(".")[2].endswith(("bias", "skip", "skips"))


def _fitting_patterns(names: list[str], config: OptimizerConfig) -> dict[str, str]:
    """Find the last pattern of `parameter_learning_rates` that each parameter's name fits, by name."""
    found: dict[str, str] = {}
    for pattern in config.parameter_learning_rates:
        fitting = dict.fromkeys((name for name in names if fnmatchcase(name, pattern)), pattern)
        if not fitting:
            got, expected = f"a mapping with {pattern!r}, which fits no parameter", "patterns of their names"
            raise ValueError(sentence("optimizer.parameter_learning_rates", got, f"{expected}, such as {names[-1]}"))
        found |= fitting
    return found


def _transition_parameter_ids(model: nn.Module) -> set[int]:
    """Collect the `id` of every parameter that a submodule names in `transition_parameters()`."""
    own = {id(parameter) for parameter in model.parameters()}
    found: set[int] = set()
    for name, module in model.named_modules():
        offers = getattr(module, "transition_parameters", None)
        if offers is None:
            continue
        ids = {id(parameter) for parameter in offers()}
        if not ids <= own:
            method = f"{name or type(module).__name__}.transition_parameters()"
            got = f"a list with {len(ids - own)} tensor(s) that are not parameters of the model"
            raise ValueError(sentence(method, got, "the module's own nn.Parameter objects"))
        found |= ids
    return found
