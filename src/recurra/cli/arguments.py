"""Telling a command's own arguments from values that are set over a recipe: a recipe's keys have a dot in
them."""

from argparse import ArgumentParser, HelpFormatter
from collections.abc import Sequence
from dataclasses import fields

from recurra.training import Experiment

SECTIONS = frozenset(field.name for field in fields(Experiment))
OVERRIDES_HELP = "--KEY VALUE sets a value over the recipe's, as in --training.epochs 2; the last one wins."


def command_parser(name: str, description: str, *, add_help: bool = True, overrides: bool = True) -> ArgumentParser:
    """A parser of a command's own arguments; its help speaks of overrides where the command takes them."""
    return ArgumentParser(
        prog=f"recurra {name}",
        description=description,
        epilog=OVERRIDES_HELP if overrides else None,
        allow_abbrev=False,
        add_help=add_help,
        formatter_class=lambda prog: HelpFormatter(prog, width=100),
    )


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the words of a command line into the command's own and those that set a recipe's values.

    Returns:
        (own, overrides): "--section.key=value", or "--section.key" and the word after it, go to the second
        list; so does a whole section.

    Raises:
        ValueError: a key is the last word and has no value.
    """
    own: list[str] = []
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        key, equals, _ = word.partition("=")
        if not (key.startswith("--") and ("." in key or key[2:] in SECTIONS)):
            own.append(word)
            continue
        overrides.append(word)
        if not equals:
            try:
                overrides.append(next(remaining))
            except StopIteration:
                raise ValueError(f"{word} needs a value") from None
    return own, overrides
