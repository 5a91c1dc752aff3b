"""The command line: `recurra COMMAND`. Each command is a module of its own, imported when it is called."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from recurra import __version__
from recurra.cli.errors import FAILED, named, report
from recurra.cli.waiting import wait_briefly

COMMANDS = {
    "prepare": ("recurra.cli.prepare", "encode a corpus of any size into shards of tokens"),
    "train": ("recurra.cli.train", "train a recipe, or resume a run"),
    "sweep": ("recurra.cli.sweep", "train a recipe with many values, and compare the runs"),
    "eval": ("recurra.cli.evaluate", "score a trained run on a split"),
    "generate": ("recurra.cli.generate", "continue a text with a trained run"),
    "serve": ("recurra.cli.serve", "serve trained runs over HTTP, and a page to look into them"),
    "explore": ("recurra.cli.explore", "look into runs in the browser: surprise, gates, forks, a game"),
    "classify": ("recurra.cli.classify", "classify videos segment by segment with a video run"),
    "export": ("recurra.cli.export", "write a run in a format that other programs load"),
    "convert": ("recurra.cli.convert", "convert between runs, folders for transformers and single files"),
    "plot": ("recurra.cli.plot", "draw the figures of one or more runs"),
    "recipes": ("recurra.cli.recipes", "list the recipes that come with Recurra, or print one"),
    "cost": ("recurra.cli.cost", "count what a segment costs: FLOPs, parameters, carried bytes"),
    "gradients": ("recurra.cli.gradients", "measure gradients between segments and their bound"),
    "demo": ("recurra.cli.demo", "train two small models and compare them"),
    "info": ("recurra.cli.info", "show versions, backends, mixers and models"),
}
DEBUG = "--debug"
IMPORT = "--import"
PLUGINS = "recurra_plugins"
"""The group of entry points whose modules are imported before every command."""
DEBUG_VARIABLE = "RECURRA_DEBUG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or that of `report` after an error, which is printed in plain words.

    With --debug anywhere among the arguments, or RECURRA_DEBUG=1 in the environment, errors are raised with their
    traceback.
    """
    wait_briefly()
    words, wants_traceback = _without_debug(sys.argv[1:] if arguments is None else arguments)
    words, modules = _without_imports(words)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else FAILED
    if words[0] == "--version":
        print(f"recurra {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"recurra: unknown command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return FAILED
    try:
        _import_own(modules)
        return int(import_module(COMMANDS[words[0]][0]).run(words[1:]))
    except (KeyboardInterrupt, BrokenPipeError) as error:  # neither is a mistake, so neither has a traceback to show
        return report(f"recurra {words[0]}", error)
    except Exception as error:
        if wants_traceback:
            raise
        return report(f"recurra {words[0]}", error)


def _without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """Remove --debug, and return whether it was there or the environment asks for the same; after -- it is a value."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != DEBUG]
    wanted = len(kept) < end or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    return [*kept, *words[end:]], wanted


def _without_imports(words: list[str]) -> tuple[list[str], list[str]]:
    """Remove each --import MODULE, and return the modules."""
    kept, modules, end = [], [], words.index("--") if "--" in words else len(words)
    left = iter(words[:end])
    for word in left:
        if word == IMPORT:
            modules.append(next(left, ""))
        elif word.startswith(f"{IMPORT}="):
            modules.append(word.partition("=")[2])
        else:
            kept.append(word)
    return [*kept, *words[end:]], modules


def _import_own(modules: Sequence[str]) -> None:
    """Import code that registers mixers, models or experiments: modules named here, and those of installed packages."""
    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()
        except Exception as error:  # of any kind: it is another package's code
            package = plugin.dist.name if plugin.dist else plugin.value
            raise ValueError(f"the plugin {plugin.name} of the package {package}: {named(error)}") from error
    sys.path.insert(0, "") if modules and "" not in sys.path else None
    for name in modules:
        if not name or name.startswith("."):
            raise ValueError(_not_found(name))
        try:
            import_module(name)
        except Exception as error:  # of any kind: it is the user's own code
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                raise ValueError(_not_found(name)) from error
            raise ValueError(f"--import {name}: {named(error)}") from error


def _not_found(module: str) -> str:
    return f"--import is {module!r}; expected a module that Python finds, such as a file here without .py"


def usage() -> str:
    """List the commands, one per line."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: recurra COMMAND [ARGUMENTS]",
            "       recurra --version",
            "",
            *lines,
            "",
            "`recurra COMMAND --help` shows its arguments. With --debug, an error comes with its traceback.",
            "--import MODULE imports code of your own first, which may register mixers, models and experiments.",
        ]
    )
