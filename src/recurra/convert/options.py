"""Options by the names of another code base: renamed, translated, neutral or refused by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from recurra.checks import require, sentence


class Neutral(NamedTuple):
    """An option that the models here lack: which values change nothing, in words too, and how to mend the others."""

    holds: Callable[[Any], bool]
    expected: str
    mend: str


NO_CROSS_ATTENTION = {
    "pruned_heads": Neutral(lambda value: not value, "none", "pruned heads are not supported"),
    "is_decoder": Neutral(lambda value: not value, "False", "as published models have it"),
    "add_cross_attention": Neutral(lambda value: not value, "False", "cross-attention is not supported"),
    "cross_attention_hidden_size": Neutral(lambda value: value is None, "None", "cross-attention is not supported"),
    "tie_encoder_decoder": Neutral(lambda value: not value, "False", "an encoder is not supported"),
}
"""What every config of transformers before 5 has."""


def take_neutral(left: dict[str, Any], table: Mapping[str, Neutral]) -> None:
    """Take out the options of a table.

    Raises:
        ValueError: naming the first that is not neutral.
    """
    for name in table.keys() & left.keys():
        value = left.pop(name)
        require(table[name].holds(value), name, value, table[name].expected, table[name].mend)


def renamed(
    left: Mapping[str, Any],
    own_names: Iterable[str],
    names: Mapping[str, str],
    translations: Mapping[str, Callable[[Any], Any]],
) -> dict[str, Any]:
    """Return the options by our names.

    Args:
        left: the options by our names or theirs.
        own_names: the options that exist here.
        names: their names to ours.
        translations: how to read the values of some of theirs, unless they are None.

    Raises:
        ValueError: two names of one option contradict each other.
        TypeError: an option does not exist.
    """
    known = set(own_names)
    own: dict[str, Any] = {}
    first_names: dict[str, str] = {}
    if wrong := [name for name in left if names.get(name, name) not in known]:
        raise TypeError(f"there is no option {', '.join(wrong)}; there are: {', '.join(sorted({*known, *names}))}")
    for name, value in left.items():
        own_name = names.get(name, name)
        translated = translations[name](value) if name in translations and value is not None else value
        if own_name in own and own[own_name] != translated:
            other = first_names[own_name]
            raise ValueError(sentence(name, repr(value), f"what says the same as {other} = {left[other]!r}"))
        own[own_name] = translated
        first_names.setdefault(own_name, name)
    return own
