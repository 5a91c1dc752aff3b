"""The options of a mixer that takes the place of a recipe's own: those that both have, and its defaults."""

from collections.abc import Mapping
from typing import Any

from recurra.mixers.base import create_mixer, mixer_options
from recurra.models.registry import on_meta

_Options = dict[str, Any]


def follow_mixer(
    before: str | list[str], options: _Options, above: Mapping[str, Any], d_model: int
) -> tuple[_Options, list[str]]:
    """Return those options of a recipe's mixers that others take, and notes on the options that they do not take.

    Args:
        before: the mixers of the recipe, one or a list as in `LanguageModelConfig`.
        options: its mixer_options.
        above: what is set over it: the key mixer, and perhaps mixer_options, which win and are not checked here.
        d_model: channels of the recipe's model; `above` may have others.

    Raises:
        ValueError: `above` names a mixer that is not registered.
    """
    after, given = above["mixer"], above.get("mixer_options") or {}
    sources = {before: options} if isinstance(before, str) else {name: options.get(name, {}) for name in before}
    if after == before or not all(isinstance(each, dict) for each in sources.values()):
        return options, []
    widths = d_model, above.get("d_model", d_model)
    if isinstance(after, str):
        return _options_for(after, widths, sources, given)
    found: _Options = {}
    notes: list[str] = []
    for name in dict.fromkeys(after):
        own = given.get(name)
        found[name], more = _options_for(name, widths, sources, own if isinstance(own, dict) else {})
        notes += more
    return {name: own for name, own in found.items() if own}, notes


def _options_for(
    name: str, widths: tuple[int, int], sources: Mapping[str, _Options], given: Mapping[str, Any]
) -> tuple[_Options, list[str]]:
    """Choose the options of one mixer from those of the mixers that the recipe has; widths: the recipe's, and now."""
    if name in sources:
        return sources[name], []
    every: _Options = {}
    for own in sources.values():
        every = {**every, **own, **every}
    allowed = mixer_options(name)
    known = {option: value for option, value in every.items() if option in allowed}
    usable = dict(known)
    if known.get("n_heads") == every.get("d_qk", widths[0]) and "n_heads" not in given:
        usable.pop("n_heads", None)  # heads of one channel are fast with GateLoop's vectors alone
    kept = _fitting(name, widths[1], usable, given)
    lacking = [repr(option) for option in every if option not in allowed and option not in given]
    refused = [f"{option} = {value!r}" for option, value in known.items() if option not in kept]
    wrong = [f"has no option {_listed(lacking)}"] if lacking else []
    wrong += [f"does not take {_listed(refused)}"] if refused else []
    whose = f"of the recipe's {', '.join(sources)}"
    return kept, [f"mixer {name} {' and '.join(wrong)} ({whose}): its defaults are used"] if wrong else []


def _fitting(name: str, d_model: int, options: _Options, given: Mapping[str, Any]) -> _Options:
    """Leave the options with which the mixer can be made, in their order: a name can mean another thing to each mixer.

    All, if it cannot be made with what is given alone: the model then says why.
    """

    def fits(some: _Options) -> bool:
        try:
            with on_meta():
                create_mixer(name, d_model, **{**some, **given})
        except (TypeError, ValueError):
            return False
        return True

    if fits(options) or not fits({}):
        return options
    found: _Options = {}
    for option, value in options.items():
        found = together if fits(together := {**found, option: value}) else found
    return found


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
