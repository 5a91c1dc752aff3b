"""Arguments that commands share, and values set over a recipe, whose keys contain a dot: --training.epochs 2."""

import json
import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recurra._choices import RECIPE_KEYS, recipe_names
from recurra.registry import did_you_mean, near

_OVERRIDES_HELP = "--KEY VALUE overrides the recipe's value, as in --training.epochs 2; the last one wins."

NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
REAL: dict[str, Any] = {"type": float, "metavar": "X"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
FOLDER: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
"""Kinds of arguments."""


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    hint = did_you_mean(word, known)
    return f"unknown {what} {word!r}{hint and f': {hint}'}"


_UNRECOGNIZED = "unrecognized arguments: "


class _CommandParser(ArgumentParser):
    """A parser that offers the option which an unknown one is near to."""

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix(_UNRECOGNIZED).replace("=", " ").partition(" ")[0]
        options = [option[2:] for option in self._option_string_actions if option != "--help"]
        close = (
            [f"--{option}" for option in near(word[2:], options)] if message.startswith(f"{_UNRECOGNIZED}--") else []
        )
        super().error(f"{message}: did you mean {' or '.join(close)}?" if close else message)


def command_parser(name: str, description: str, *, add_help: bool = True, overrides: bool = True) -> ArgumentParser:
    return _CommandParser(
        prog=f"recurra {name}",
        description=description,
        epilog=_OVERRIDES_HELP if overrides else None,
        allow_abbrev=False,
        add_help=add_help,
        formatter_class=lambda prog: RawDescriptionHelpFormatter(prog, width=100),
    )


def add_style(parser: ArgumentParser) -> None:
    style = parser.add_mutually_exclusive_group()
    for name in ("json", "csv", "latex"):
        style.add_argument(f"--{name}", dest="style", action="store_const", const=name, help=f"print as {name}")


def add_checkpoint(parser: ArgumentParser, *, of: str = "checkpoint to load") -> None:
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="WHICH",
        help=f"{of}: best (default), last, previous or the path of a file",
    )


def add_device(parser: ArgumentParser, verb: str, *, default: str) -> None:
    which = {
        "auto": f"where to {verb}: cpu, cuda or auto (default; a CUDA GPU if there is one)",
        "cpu": f"where to {verb}: cpu (default), cuda or auto (a CUDA GPU if there is one)",
    }
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default=default, help=which[default])


def parsed(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parse a command's words; `overrides` of the result has those that set values over the recipe's."""
    own, overrides = ([], []) if completing() else split_overrides(words)
    return parsed_alone(parser, own, Namespace(overrides=overrides))


def parsed_alone(parser: ArgumentParser, words: Sequence[str], namespace: Namespace | None = None) -> Namespace:
    """Parse the words of a command that takes no recipe's values, or answer a shell that asks what may come next."""
    if completing():
        _complete(parser)
    return parser.parse_args(words, namespace)


def completing() -> bool:
    """Whether a shell asks what may come next: `eval "$(register-python-argcomplete recurra)"` has it ask."""
    return "_ARGCOMPLETE" in os.environ


def complete_among(names: Iterable[str]) -> list[str]:
    """Answer a shell that asks which of `names` comes next in its line, and end the program.

    If one of them is written there already, return it and the words after it: its own parser shall answer.
    """
    line, before = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])], int(os.environ["_ARGCOMPLETE"])
    words = line.split()[before:]  # those before are the program and its command, as the shell or this function says
    if words and words[0] in names and (len(words) > 1 or line[-1].isspace()):
        os.environ["_ARGCOMPLETE"] = str(before + 1)
        return words
    parser = ArgumentParser(add_help=False)
    parser.add_argument("name", choices=names)
    _complete(parser)
    raise SystemExit


def _recipe_words() -> list[str]:
    """List what a recipe may be called: its name, and its folder if that has no other recipe."""
    names = recipe_names()
    folders = Counter(name.partition("/")[0] for name in names)
    return [*names, *(folder for folder, count in folders.items() if count == 1)]


def _run_names() -> list[str]:
    """List what a run may be called: the models that come with Recurra, and the runs in runs/."""
    index = Path(__file__).parents[1] / "pretrained_models" / "index.json"
    shipped = json.loads(index.read_text(encoding="utf-8"))
    return [*shipped, *(path.parent.name for path in sorted(Path("runs").glob("*/config.yaml")))]


_NAMED: dict[Any, Callable[[], list[str]]] = {"RECIPE": _recipe_words, "NAME": recipe_names, "RUN": _run_names}
"""The names that a shell completes beside files, by what stands for an argument in its help."""


def _complete(parser: ArgumentParser) -> None:
    import argcomplete

    for action in parser._actions:
        if action.metavar in _NAMED:
            action.completer = _with_files(_NAMED[action.metavar])  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _with_files(names: Callable[[], list[str]]) -> Callable[..., list[str]]:
    from argcomplete.completers import FilesCompleter

    return lambda prefix, **parsing: [*names(), *FilesCompleter()(prefix)]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate a command's own words from those that set a recipe's keys or whole sections, with their values."""
    own: list[str] = []
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        key, equals, _ = word.partition("=")
        if not (key.startswith("--") and ("." in key or key[2:] in RECIPE_KEYS)):
            own.append(word)
            continue
        overrides.append(word)
        if not equals:
            value = next(remaining, None)
            if value is None:
                raise ValueError(f"{word} is the last word; expected a value after it")
            overrides.append(value)
    return own, overrides
