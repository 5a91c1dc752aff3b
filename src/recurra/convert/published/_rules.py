"""How weights here and in another code base correspond: rules that are read in both directions."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recurra.checks import require, sentence
from recurra.convert.published._settings import Settings
from recurra.models.language_model import LanguageModelConfig

_N_SHOWN = 5
SWIGLU = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""The layers of a SwiGLU network, as most of transformers' models name them."""


class Rule(NamedTuple):
    """What a parameter here is made of there."""

    own: str
    """A pattern of the parameter's names here, matched in full."""
    theirs: tuple[str, ...]
    """The names there, in which `\\1` stands for the pattern's first group."""
    read: Callable[..., Tensor] = lambda tensor: tensor
    """Makes the parameter from their tensors."""
    write: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)
    """Makes their tensors from the parameter."""


def plain_rules(own: str, theirs: str, names: Mapping[str, str], suffix: str = "") -> list[Rule]:
    """Rules for parameters that only have other names there; `suffix` follows both names."""
    return [
        Rule(rf"{own}\.{re.escape(name + suffix)}", (f"{theirs}.{other}{suffix}",)) for name, other in names.items()
    ]


def stacked(own: str, theirs: Sequence[str], sizes: Sequence[int]) -> Rule:
    """A parameter whose rows are those of several tensors there, of these sizes, one after the other."""
    return Rule(own, tuple(theirs), lambda *parts: torch.cat(parts), lambda whole: whole.split(list(sizes)))


def one_more(own: str, theirs: str) -> Rule:
    """A scale that the other code keeps as its distance from 1."""
    return Rule(own, (theirs,), lambda tensor: tensor + 1, lambda tensor: (tensor - 1,))


class Architecture(NamedTuple):
    """What a converter knows of a published architecture."""

    model_type: str
    """Its name in config.json."""
    class_name: str
    """Transformers' class."""
    mixer: str
    """The mixer here that it is known by."""
    config: Callable[[Settings], LanguageModelConfig]
    """Makes the model's shape from config.json."""
    rules: Callable[[LanguageModelConfig], list[Rule]]
    """The weights, for a shape."""
    settings: Callable[[LanguageModelConfig], dict[str, Any]]
    """Makes the entries of config.json from a shape, for the way back."""
    fits: Callable[[LanguageModelConfig], bool] = lambda config: True
    """Whether a shape with that mixer is of this architecture, where several have the mixer."""
    head: str = "lm_head.weight"
    """The output matrix there, which a folder omits if it is the embedding."""
    fused: Callable[[LanguageModelConfig], list["Fused"]] = lambda config: []
    """Matrices there that are split before the rules see them, for a shape."""


class _Place(NamedTuple):
    """A parameter here: its name, its tensors' names there, and its rule."""

    own: str
    theirs: tuple[str, ...]
    rule: Rule


def matched(model: nn.Module, weights: Mapping[str, Tensor], rules: Sequence[Rule], what: str) -> list[_Place]:
    """Find the tensors of every parameter, and refuse weights that are not exactly the model's own."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = _places(parameters, rules)
    given = [place for place in places if all(name in weights for name in place.theirs)]
    filled = {id(parameters[place.own]) for place in given}
    missing = [name for place in places if id(parameters[place.own]) not in filled for name in place.theirs]
    missing = [name for name in missing if name not in weights]
    unknown = sorted(weights.keys() - {name for place in places for name in place.theirs})
    if missing or unknown:
        parts = [f"{kind}: {_listed(names)}" for kind, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ValueError(sentence(what, f"not one model's ({'; '.join(parts)})", "the weights of a whole model"))
    for place in given:
        for name, part in zip(place.theirs, place.rule.write(parameters[place.own].detach()), strict=True):
            got, wanted = tuple(weights[name].shape), tuple(part.shape)
            if got != wanted:
                raise ValueError(sentence(f"the shape of {name} in {what}", got, f"{wanted}, as its config.json says"))
    return given


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], places: Sequence[_Place], what: str) -> None:
    """Fill every parameter of `model` from where `matched` found it."""
    first: dict[int, str] = {}
    for place in places:
        parameter = model.get_parameter(place.own)
        values = place.rule.read(*(weights[name].to(parameter.dtype) for name in place.theirs))
        name = first.setdefault(id(parameter), place.theirs[0])
        if name == place.theirs[0]:
            parameter.copy_(values)
        elif not torch.equal(values, parameter):
            got = f"one in which {name} and {place.theirs[0]} differ"
            raise ValueError(sentence(what, got, "one in which they are equal, as its config.json ties them"))


def weights_by_their_names(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Return the weights of `model` as the other code base names and lays them out; tied ones under each name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: tensor.clone().contiguous()
        for place in _places(parameters, rules)
        for name, tensor in zip(place.theirs, place.rule.write(parameters[place.own].detach()), strict=True)
    }


def _places(parameters: Mapping[str, nn.Parameter], rules: Sequence[Rule]) -> list[_Place]:
    places = []
    for own in parameters:
        rule, match = next((rule, match) for rule in rules if (match := re.fullmatch(rule.own, own)))
        places.append(_Place(own, tuple(match.expand(name) for name in rule.theirs), rule))
    return places


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_N_SHOWN])
    return shown if len(names) <= _N_SHOWN else f"{shown} and {len(names) - _N_SHOWN} more"


# --- tensors of another code base in which the rows of several matrices take turns, head by head ---


class Fused(NamedTuple):
    """A matrix whose rows are those of one group of heads after the other, and within a group part by part.

    name: the matrix there.
    parts: names for the parts, which rules know as `NAME[PART]`.
    n_groups: groups of heads.
    sizes: rows of every part in one group.
    """

    name: str
    parts: tuple[str, ...]
    n_groups: int
    sizes: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """What rules call the parts."""
        return [f"{self.name}[{part}]" for part in self.parts]


def split_fused(weights: dict[str, Tensor], fused: Sequence[Fused], what: str) -> dict[str, Tensor]:
    """Replace fused matrices by their parts; those that are missing stay so."""
    weights = dict(weights)
    for one in fused:
        if (whole := weights.pop(one.name, None)) is None:
            continue
        n_rows = one.n_groups * sum(one.sizes)
        if whole.dim() != 2 or len(whole) != n_rows:
            got = tuple(whole.shape)
            raise ValueError(
                sentence(f"the shape of {one.name} in {what}", got, f"{n_rows} rows, as its config.json says")
            )
        parts = whole.unflatten(0, (one.n_groups, -1)).split(list(one.sizes), 1)
        weights |= zip(one.names, (part.flatten(0, 1) for part in parts), strict=True)
    return weights


def join_fused(weights: dict[str, Tensor], fused: Sequence[Fused]) -> dict[str, Tensor]:
    """The way back of `split_fused`."""
    weights = dict(weights)
    for one in fused:
        parts = [weights.pop(name).unflatten(0, (one.n_groups, -1)) for name in one.names]
        weights[one.name] = torch.cat(parts, 1).flatten(0, 1)
    return weights


# --- rotary attention of transformers: channel i of a head turns with i + n / 2, and here 2i turns with 2i + 1 ---


def take_rotation(settings: Settings, share: float) -> tuple[float, float]:
    """Take the base of the angles and the share of the channels that turn, which is `share` by default."""
    rotation = settings.section("rope_parameters")
    base = rotation.number("rope_theta", settings.number("rope_theta", 10000.0))
    share = rotation.number("partial_rotary_factor", settings.number("partial_rotary_factor", share))
    require(0 <= share <= 1, "partial_rotary_factor", share, "a share from 0 to 1")
    rotation.only("rope_type", "default")
    rotation.only("type", "default")  # its name in older files
    rotation.finish()
    settings.only("rope_scaling", None)
    return base, share


def attention_heads(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the heads of queries, and of keys and values, by the defaults of rotary attention here."""
    n_heads = options.get("n_heads", 4)
    return n_heads, options.get("n_kv_heads") or n_heads


def turned_pairs(d_head: int, n_rotated: int) -> Tensor:
    """The order of a head's channels, as numbers of theirs."""
    halves = torch.arange(n_rotated).view(2, -1)
    return torch.cat([halves.T.flatten(), torch.arange(n_rotated, d_head)])


def reordered(weight: Tensor, order: Tensor) -> Tensor:
    """Bring the rows of every head into an order."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def qkv_rule(own: str, theirs: Sequence[str], n_heads: int, n_kv_heads: int, order: Tensor) -> Rule:
    """The projections of queries, keys and values, one matrix here, of heads whose channels come in `order`."""
    rows, back = [n * len(order) for n in (n_heads, n_kv_heads, n_kv_heads)], torch.argsort(order)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([reordered(q, order), reordered(k, order), v])

    def write(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split(rows)
        return reordered(q, back), reordered(k, back), v

    return Rule(own, tuple(theirs), read, write)
