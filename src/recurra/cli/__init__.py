"""The command line: `recurra COMMAND`. The function of a command is imported when its arguments have been parsed."""

import logging
import os
import re
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points

from recurra import __version__
from recurra.cli import _parsers
from recurra.cli._arguments import complete_among, completing, unknown
from recurra.registry import own_modules

COMMANDS = {
    "prepare": (_parsers.prepare, "prepare:prepare", "encode a corpus of any size into shards of tokens"),
    "train": (_parsers.train, "train:train", "train a recipe, or resume a run"),
    "sweep": (_parsers.sweep, "sweep:sweep", "train a recipe with a grid of values and compare the runs"),
    "compare": (_parsers.compare, "compare:compare", "train a recipe with several mixers and print one table"),
    "eval": (_parsers.evaluate, "train:evaluate", "score a trained run on a split"),
    "generate": (_parsers.generate, "generate:generate", "generate text with a trained run"),
    "serve": (_parsers.serve, "serve:serve", "serve trained runs over HTTP, with a page for inspecting them"),
    "explore": (_parsers.explore, "serve:explore", "inspect runs in the browser: surprisal, gates, forks, a game"),
    "classify": (_parsers.classify, "classify:classify", "classify videos segment by segment with a video run"),
    "export": (_parsers.export, "export:export", "export a run to a format for other programs"),
    "convert": (_parsers.convert, "export:convert", "convert between runs, transformers folders and single files"),
    "plot": (_parsers.plot, "figures:plot", "draw the figures of one or more runs"),
    "recipes": (_parsers.recipes, "train:recipes", "list the recipes in the package, or print one"),
    "cost": (_parsers.cost, "figures:cost", "count the cost of a segment: FLOPs, parameters, state size"),
    "gradients": (_parsers.gradients, "figures:gradients", "measure gradients between segments and their bound"),
    "demo": (_parsers.demo, "demo:demo", "train two small models and compare them"),
    "models": (_parsers.models, "info:models", "list the trained models in the package"),
    "info": (_parsers.info, "info:info", "show versions, backends, mixers and models, or describe a run"),
}
"""What parses the arguments of each command, the module and function that take them, and what it does."""

_FAILED = 2
_MISTAKE = 70  # EX_SOFTWARE of sysexits.h: the fault is in Recurra, not in what it was given
_INTERRUPTED = 130
_CLOSED_PIPE = 141  # what shells report for a program that wrote into a closed pipe: 128 + SIGPIPE
_EXTRAS = {
    "train": (
        "lightning_fabric",
        "jsonargparse",
        "tokenizers",
        "rich",
        "yaml",
        "tensorboard",
        "platformdirs",
        "argcomplete",
    ),
    "video": ("av",),
    "hf": ("transformers", "peft", "gguf"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "plot": ("matplotlib", "cycler"),
    "serve": ("fastapi", "uvicorn", "pydantic", "starlette", "sse_starlette", "prometheus_client", "jinja2"),
    "executorch": ("executorch",),
    "data": ("datasets",),
    "optimizers": ("pytorch_optimizer",),
}
"""The packages beyond the core by the extra that installs them."""
# PyTorch on a CPU: "you tried to allocate 400 bytes"; on CUDA: "Tried to allocate 20.00 GiB"; NumPy: "Unable to
# allocate 8.00 PiB"
_ALLOCATION = re.compile(r"(?:tried|unable) to allocate ([\d.]+ ?(?:bytes|[KMGTPE]i?B))", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or that of `report` after an error, which is printed in plain words.

    With --debug anywhere among the arguments, or RECURRA_DEBUG=1 in the environment, errors are raised with their
    traceback.
    """
    _let_threads_sleep()
    parser = ArgumentParser(prog="recurra", add_help=False, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", default=os.environ.get("RECURRA_DEBUG", "0") not in ("", "0"))
    parser.add_argument("--import", dest="modules", action="append", default=[])
    own, words = parser.parse_known_args(arguments)  # what comes after -- is a value
    if completing():
        words = complete_among(COMMANDS)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else _FAILED
    if words[0] == "--version":
        print(f"recurra {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"recurra: {unknown('command', words[0], COMMANDS)}\n\n{_usage()}", file=sys.stderr)
        return _FAILED
    try:
        parse, place, _ = COMMANDS[words[0]]
        given = parse(words[1:])
        _announce_compiling()
        _import_own(own.modules)
        module, _, function = place.partition(":")
        with _warnings_as_notes():
            return int(getattr(import_module(f"recurra.cli.{module}"), function)(given))
    except (KeyboardInterrupt, BrokenPipeError) as error:  # neither is a mistake, so neither has a traceback to show
        return report(f"recurra {words[0]}", error)
    except Exception as error:
        if own.debug:
            raise
        return report(f"recurra {words[0]}", error)
    finally:
        own_modules.clear()


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print each warning of Recurra itself once, as one line, without the place in its code."""
    as_before, package = warnings.formatwarning, os.path.dirname(os.path.dirname(__file__))
    said = set()

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is not UserWarning or not filename.startswith(package + os.sep):
            return as_before(message, category, filename, lineno, line)
        note = f"note: {message}\n"
        if note in said:
            return ""
        said.add(note)
        return note

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = as_before


def _let_threads_sleep() -> None:
    """Have torch's threads sleep soon when there is no work, unless the environment says otherwise."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _announce_compiling() -> None:
    """Have a terminal told of kernels that are compiled at their first use: nothing else appears in these seconds."""
    kernels = logging.getLogger("recurra.kernels")
    if sys.stderr.isatty() and not kernels.handlers:
        kernels.addHandler(logging.StreamHandler())
        kernels.setLevel(logging.INFO)


def _import_own(modules: Sequence[str]) -> None:
    """Import code that registers mixers, models or experiments: modules named here, and those of installed packages."""
    for plugin in entry_points(group="recurra_plugins"):
        try:
            plugin.load()
        except Exception as error:  # of any kind: it is another package's code
            package = plugin.dist.name if plugin.dist else plugin.value
            raise ValueError(f"the plugin {plugin.name} of the package {package}: {_named(error)}") from error
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for name in modules:
        not_found = f"--import is {name!r}; expected a module that Python finds, such as a file here without .py"
        if not name or name.startswith("."):
            raise ValueError(not_found)
        try:
            import_module(name)
        except Exception as error:  # of any kind: it is the user's own code
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                raise ValueError(not_found) from error
            raise ValueError(f"--import {name}: {_named(error)}") from error
        own_modules.append(name)


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (*_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: recurra COMMAND [ARGUMENTS]",
            "       recurra --version",
            "",
            *lines,
            "",
            "`recurra COMMAND --help` shows its arguments. --debug shows the traceback of an error.",
            "--import MODULE first imports your own code, which can register mixers, models and experiments.",
        ]
    )


def report(command: str, error: BaseException) -> int:
    """Print what happened, for `error` as a command raised it, and return the exit code."""
    if isinstance(error, BrokenPipeError):  # `recurra generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again when it exits
        return _CLOSED_PIPE
    text, code = _described(error)
    with suppress(OSError):  # nobody reads, as after the terminal was closed
        print(f"{command}: {text}", file=sys.stderr)
    return code


def missing_extra(error: ImportError) -> str | None:
    """Say which extra installs the package that could not be imported; None if no extra does."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
    return extra and f'{error.name} is missing: pip install "recurra[{extra}]"'


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _described(error: BaseException) -> tuple[str, int]:
    """Describe an error in plain words, with the exit code for its kind."""
    if isinstance(error, KeyboardInterrupt):
        return ": ".join(["interrupted", *map(str, error.args)]), _INTERRUPTED
    if isinstance(error, ImportError) and (missing := missing_extra(error)):
        return missing, _FAILED
    asked_for = _ALLOCATION.search(str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and asked_for):
        how_much = f"could not allocate {asked_for[1]}" if asked_for else "an allocation failed"
        return f"out of memory: {how_much}; use a smaller model, batch or sequence", _FAILED
    is_check = isinstance(error, TypeError) and "; expected " in str(error)  # of a mixer's option, for example
    if is_check or isinstance(error, (ValueError, OSError, FloatingPointError)):
        # The library raises these for a wrong key, value, file or checkpoint, and for a run that diverged.
        return str(error), _FAILED
    return f"{_named(error)}. This is a bug; please report it with the traceback that --debug shows", _MISTAKE
