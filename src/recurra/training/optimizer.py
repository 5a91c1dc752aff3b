"""AdamW, SGD, Muon, SOAP or an optimiser of one's own over parameter groups that follow from rules.

The papers leave open which parameters decay. Here, tensors with two or more dimensions do, embeddings included; biases
and norm scales do not. The parameters that make the state transition may have their own learning rate and weight decay,
as in GateLoop Table 4; each module names its own in a method `transition_parameters()`. A pattern of names sets the
rate of any others.
"""

from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recurra.checks import sentence
from recurra.training.config import OPTIMIZER_OPTIONS, OptimizerConfig
from recurra.training.muon import matrix_ids
from recurra.training.optimizer_registry import optimizer_factory

ParameterGroup = dict[str, Any]


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, precision: str = "32-true") -> Optimizer:
    """Build the optimiser of `config.algorithm` over `parameter_groups`.

    AdamW and SGD are in the fused form, with one pass over each parameter, on the CPU and on a GPU. `precision` is
    `training.precision`: with bf16-mixed, Muon's products are in bfloat16, like those of the model.

    Raises:
        ValueError: there is no such optimiser, or it has no such option.
    """
    groups = parameter_groups(model, config)
    options = config.options
    if config.algorithm in OPTIMIZER_OPTIONS:
        options = {_TORCH_NAMES.get(name, name): value for name, value in options.items()}
        options.pop("matrix_learning_rate", None)  # the groups have it
    if config.algorithm == "muon":
        options["bfloat16"] = precision == "bf16-mixed"
    return optimizer_factory(config.algorithm, options)(groups, lr=config.learning_rate, **options)


_TORCH_NAMES = {"epsilon": "eps"}


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[ParameterGroup]:
    """Sort the trainable parameters of `model` into groups with the same learning rate and weight decay.

    Each group has the keys `name`, `params`, `lr`, `peak_lr` (which a schedule scales), `weight_decay` and, for Muon,
    `orthogonal`. Tied parameters count once, under their first name.

    Raises:
        ValueError: a module names a transition parameter that the model does not have, or the configuration has a
            setting for such parameters and there are none, or a pattern of names that fits no parameter.
    """
    transition = transition_parameter_ids(model)
    if not transition:
        _require_no_transition_settings(config)
    muon = config.algorithm == "muon"
    matrices = matrix_ids(model) - transition if muon else set()
    patterns = _fitting_patterns(model, config)
    members: dict[tuple[str, float, float, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter_name, parameter in _trainable(model):
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        name, rate = "base", config.learning_rate
        if id(parameter) in transition:
            name, rate = "transition", config.transition_learning_rate or rate
            decay = decay if config.transition_weight_decay is None else config.transition_weight_decay
        if id(parameter) in matrices:
            name, rate = "matrices", config.options["matrix_learning_rate"]
        if parameter_name in patterns:
            name = patterns[parameter_name]
            rate = config.parameter_learning_rates[name]
        members[name, rate, decay, id(parameter) in matrices].append(parameter)
    groups = [
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
    check_groups(model, groups)
    return groups


def _fitting_patterns(model: nn.Module, config: OptimizerConfig) -> dict[str, str]:
    """Find the last pattern of `parameter_learning_rates` that each parameter's name fits, by name."""
    names = [name for name, _ in _trainable(model)]
    found: dict[str, str] = {}
    for pattern in config.parameter_learning_rates:
        fitting = dict.fromkeys((name for name in names if fnmatchcase(name, pattern)), pattern)
        if not fitting:
            came, expected = f"a mapping with {pattern!r}, which fits no parameter", "patterns of their names"
            raise ValueError(sentence("optimizer.parameter_learning_rates", came, f"{expected}, such as {names[-1]}"))
        found |= fitting
    return found


def _require_no_transition_settings(config: OptimizerConfig) -> None:
    for name in ("transition_learning_rate", "transition_weight_decay"):
        if (value := getattr(config, name)) is not None:
            came = f"{value}, for a model without parameters that make a state transition"
            raise ValueError(sentence(f"optimizer.{name}", came, "null (none)"))


def transition_parameter_ids(model: nn.Module) -> set[int]:
    """Collect the `id` of every parameter that a submodule names in `transition_parameters()`.

    Raises:
        ValueError: one of them is not a parameter of `model`, so that no rule would ever reach it.
    """
    own = {id(parameter) for parameter in model.parameters()}
    found: set[int] = set()
    for name, module in model.named_modules():
        offers = getattr(module, "transition_parameters", None)
        if offers is None:
            continue
        ids = {id(parameter) for parameter in offers()}
        if not ids <= own:
            method = f"{name or type(module).__name__}.transition_parameters()"
            came = f"a list with {len(ids - own)} tensor(s) that are not parameters of the model"
            raise ValueError(sentence(method, came, "the module's own nn.Parameter objects"))
        found |= ids
    return found


def check_groups(model: nn.Module, groups: Iterable[ParameterGroup]) -> None:
    """Raise a ValueError with the names unless every trainable parameter is in exactly one group."""
    counts: dict[int, int] = defaultdict(int)
    for group in groups:
        for parameter in group["params"]:
            counts[id(parameter)] += 1
    names = {id(parameter): name for name, parameter in _trainable(model)}
    missing = [name for key, name in names.items() if counts[key] == 0]
    repeated = [name for key, name in names.items() if counts[key] > 1]
    foreign = sum(key not in names for key in counts)
    if missing or repeated or foreign:
        came = f"a list with parameters missing: {missing}, repeated: {repeated}, not of this model: {foreign}"
        raise ValueError(sentence("groups", came, "every trainable parameter of the model exactly once"))


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
