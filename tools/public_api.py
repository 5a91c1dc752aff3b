"""The public API: which names semantic versioning covers, and the record of them that a release must keep.

Public are the names in `__all__` of the packages below, with the parameters of their functions and classes.

    python -m tools.public_api           # compare the package with docs/reference/public-api.txt
    python -m tools.public_api --write   # record what is there, before a release
"""

import argparse
import importlib
import inspect
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "docs" / "reference" / "public-api.txt"
PACKAGES = (
    "recurra",
    "recurra.ops.scan",
    "recurra.ops.gate_loop",
    "recurra.ops.delta_rule",
    "recurra.ops.selective_scan",
    "recurra.state",
    "recurra.ops.cells",
    "recurra.layers",
    "recurra.mixers",
    "recurra.models",
    "recurra.data",
    "recurra.train.tasks",
    "recurra.video",
    "recurra.train",
    "recurra.train.run",
    "recurra.pretrained",
    "recurra.testing",
    "recurra.streams",
    "recurra.decoding",
    "recurra.analysis",
    "recurra.analysis.plots",
    "recurra.convert",
    "recurra.convert.huggingface",
    "recurra.convert.export",
)
"""In the order in which the reference shows them."""


def public_names(package: str) -> list[str]:
    """List the public names of a package, in alphabetical order.

    A module without `__all__`, such as `recurra.state`, has those that it defines and that no underscore hides.
    """
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == package
        ]
    return sorted(names, key=lambda name: (name.lower(), name))


def described(package: str) -> Iterator[str]:
    """Describe each public name in a line: what calls it, or that it is no function or class."""
    module = importlib.import_module(package)
    for name in public_names(package):
        yield f"{package}.{name}{_parameters(getattr(module, name))}"


def _parameters(thing: Any) -> str:
    """The parameters in parentheses, * before those by keyword alone; nothing for what is not called."""
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return ""
    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except ValueError:  # of a class that C defines
        return "()"
    names = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        if p.kind is not p.VAR_POSITIONAL:
            names.append(("**" if p.kind is p.VAR_KEYWORD else "") + p.name)
    return f"({', '.join(names)})"


def present() -> list[str]:
    """Describe the public names of all packages."""
    return [line for package in PACKAGES for line in described(package)]


def lost(recorded: list[str], found: list[str]) -> list[str]:
    """Name what was recorded and is gone: names, and parameters and their places of names that are still there."""
    now = dict(map(_split, found))
    missing = []
    for line in recorded:
        name, parameters = _split(line)
        if name not in now:
            missing.append(name)
        else:
            missing += [f"{name}: {gone}" for gone in _lost_parameters(parameters, now[name])]
    return missing


def _lost_parameters(recorded: list[str], found: list[str]) -> list[str]:
    gone = [f"parameter {parameter}" for parameter in recorded if parameter not in [*found, "*"]]
    before, now = (list(takewhile(lambda parameter: parameter[0] != "*", each)) for each in (recorded, found))
    moved = [one for place, one in enumerate(before) if one in found and one not in now[place : place + 1]]
    return gone + [f"place of parameter {parameter}" for parameter in moved]


def _split(line: str) -> tuple[str, list[str]]:
    name, _, parameters = line.removesuffix(")").partition("(")
    return name, [parameter for parameter in parameters.split(", ") if parameter]


def main() -> None:
    """Compare, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the names that are there now")
    found = present()
    if parser.parse_args().write:
        RECORD.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
        return
    recorded = RECORD.read_text(encoding="utf-8").splitlines()
    gone = lost(recorded, found)
    new = [line for line in found if line not in recorded]
    print(*(f"gone: {name}" for name in gone), *(f"new: {line}" for line in new), sep="\n")
    raise SystemExit(1 if gone else 0)


if __name__ == "__main__":
    main()
