"""The options of a mixer that takes the place of a recipe's own: those that both have, and its defaults."""

import itertools
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
        d_model: channels of the model.

    Raises:
        ValueError: `above` names a mixer that is not registered.
    """
    after, given = above["mixer"], above.get("mixer_options") or {}
    sources = {before: options} if isinstance(before, str) else {name: options.get(name, {}) for name in before}
    if after == before or not all(isinstance(each, dict) for each in sources.values()):
        return options, []
    if isinstance(after, str):
        return _options_for(after, d_model, sources, given)
    found: _Options = {}
    notes: list[str] = []
    for name in dict.fromkeys(after):
        own = given.get(name)
        found[name], more = _options_for(name, d_model, sources, own if isinstance(own, dict) else {})
        notes += more
    return {name: own for name, own in found.items() if own}, notes


def _options_for(
    name: str, d_model: int, sources: Mapping[str, _Options], given: Mapping[str, Any]
) -> tuple[_Options, list[str]]:
    """Choose the options of one mixer from those of the mixers that the recipe has."""
    if name in sources:
        return sources[name], []
    every: _Options = {}
    for own in sources.values():
        every = {**every, **{option: value for option, value in own.items() if option not in every}}
    allowed = mixer_options(name)
    kept = {option: value for option, value in every.items() if option in allowed}
    unfit = _unfit(name, d_model, kept, given)
    lacking = [repr(option) for option in every if option not in allowed and option not in given]
    refused = [f"{option} = {kept.pop(option)!r}" for option in unfit]
    wrong = [f"has no option {_listed(lacking)}"] if lacking else []
    wrong += [f"cannot be made with {_listed(refused)}"] if refused else []
    whose = f"of the recipe's {', '.join(sources)}"
    return kept, [f"mixer {name} {' and '.join(wrong)} ({whose}): its defaults are used"] if wrong else []


def _unfit(name: str, d_model: int, kept: _Options, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Find the fewest options that must go for the mixer to be made, as a name can mean another thing to each mixer.

    None, if it cannot be made with what is given alone: the model then says why.
    """

    def fits(without: tuple[str, ...]) -> bool:
        options = {option: value for option, value in kept.items() if option not in without}
        try:
            with on_meta():
                create_mixer(name, d_model, **{**options, **given})
        except (TypeError, ValueError):
            return False
        return True

    ours = [option for option in reversed(kept) if option not in given]
    if not ours or fits(()) or not fits(tuple(ours)):
        return ()
    subsets = (subset for size in range(1, len(ours)) for subset in itertools.combinations(ours, size))
    return next(filter(fits, subsets), tuple(ours))


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
