"""How weights here and in another code base correspond: rules that are read in both directions."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recurra.checks import sentence

_N_SHOWN = 5


class Rule(NamedTuple):
    """What a parameter here is made of there.

    own: a pattern of the parameter's names here, matched in full.
    theirs: the names there, in which `\\1` stands for the pattern's first group.
    read: makes the parameter from their tensors.
    write: makes their tensors from the parameter.
    """

    own: str
    theirs: tuple[str, ...]
    read: Callable[..., Tensor] = lambda tensor: tensor
    write: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)


def stacked(own: str, theirs: Sequence[str], sizes: Sequence[int]) -> Rule:
    """A parameter whose rows are those of several tensors there, of these sizes, one after the other."""
    return Rule(own, tuple(theirs), lambda *parts: torch.cat(parts), lambda whole: whole.split(list(sizes)))


def one_more(own: str, theirs: str) -> Rule:
    """A scale that the other code keeps as its distance from 1."""
    return Rule(own, (theirs,), lambda tensor: tensor + 1, lambda tensor: (tensor - 1,))


class Place(NamedTuple):
    """A parameter here: its name, its tensors' names there, and its rule."""

    own: str
    theirs: tuple[str, ...]
    rule: Rule


def matched(model: nn.Module, weights: Mapping[str, Tensor], rules: Sequence[Rule], what: str) -> list[Place]:
    """Find the tensors of every parameter, and refuse weights that are not exactly the model's own.

    Args:
        model: of the shape of the weights; it may be on the device meta. Of a tied parameter one name is enough.
        weights: by the other code's names.
        rules: one for every name of a parameter here.
        what: what messages call the weights.

    Raises:
        ValueError: names are missing or unknown, or shapes differ.
    """
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
            came, wanted = tuple(weights[name].shape), tuple(part.shape)
            if came != wanted:
                raise ValueError(sentence(f"the shape of {name} in {what}", came, f"{wanted}, as its config.json says"))
    return given


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], places: Sequence[Place], what: str) -> None:
    """Fill every parameter of `model` from where `matched` found it.

    Raises:
        ValueError: two tensors differ that the model ties.
    """
    first: dict[int, str] = {}
    for place in places:
        parameter = model.get_parameter(place.own)
        values = place.rule.read(*(weights[name].to(parameter.dtype) for name in place.theirs))
        name = first.setdefault(id(parameter), place.theirs[0])
        if name == place.theirs[0]:
            parameter.copy_(values)
        elif not torch.equal(values, parameter):
            came = f"one in which {name} and {place.theirs[0]} differ"
            raise ValueError(sentence(what, came, "one in which they are equal, as its config.json ties them"))


def weights_by_their_names(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Return the weights of `model` as the other code base names and lays them out; tied ones under each name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: tensor.clone().contiguous()
        for place in _places(parameters, rules)
        for name, tensor in zip(place.theirs, place.rule.write(parameters[place.own].detach()), strict=True)
    }


def _places(parameters: Mapping[str, nn.Parameter], rules: Sequence[Rule]) -> list[Place]:
    places = []
    for own in parameters:
        rule, match = next((rule, match) for rule in rules if (match := re.fullmatch(rule.own, own)))
        places.append(Place(own, tuple(match.expand(name) for name in rule.theirs), rule))
    return places


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_N_SHOWN])
    return shown if len(names) <= _N_SHOWN else f"{shown} and {len(names) - _N_SHOWN} more"
