"""The command line: `recurra COMMAND`. Each command is a module of its own, imported when it is called."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "train": ("recurra.cli.train", "train a recipe, or resume a run"),
    "eval": ("recurra.cli.evaluate", "score a trained run on a split"),
    "generate": ("recurra.cli.generate", "continue a text with a trained run"),
    "classify": ("recurra.cli.classify", "classify videos segment by segment with a video run"),
    "export": ("recurra.cli.export", "write a run in a format that other programs load"),
    "convert": ("recurra.cli.convert", "convert between runs, folders for transformers and single files"),
    "plot": ("recurra.cli.plot", "draw the figures of one or more runs"),
    "table": ("recurra.cli.table", "list a family's recipes with published and measured scores"),
    "cost": ("recurra.cli.cost", "count what a segment costs: FLOPs, parameters, carried bytes"),
    "gradients": ("recurra.cli.gradients", "measure gradients between segments and their bound"),
    "demo": ("recurra.cli.demo", "train two small models and compare them"),
    "info": ("recurra.cli.info", "show versions, backends, mixers and models"),
}
EXTRAS = {
    "av": "video",
    "transformers": "hf",
    "safetensors": "hf",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "executorch": "executorch",
}
"""Packages that some commands need, with the extra that installs each."""

DEBUG_VARIABLE = "RECURRA_DEBUG"
FAILED = 2
NOBODY_READS = 141  # what shells report for a program that wrote into a closed pipe: 128 + SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 2 after an error, which is printed in plain words.

    With RECURRA_DEBUG=1 in the environment, errors are raised with their traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else FAILED
    if words[0] not in COMMANDS:
        print(f"recurra: unknown command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return FAILED
    try:
        return int(import_module(COMMANDS[words[0]][0]).run(words[1:]))
    except KeyboardInterrupt:
        print("recurra: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `recurra generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again when it exits
        return NOBODY_READS
    except ImportError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None or _wants_tracebacks():
            raise
        print(f"recurra {words[0]}: {error.name} is missing: pip install recurra[{extra}]", file=sys.stderr)
        return FAILED
    except (ValueError, OSError, FloatingPointError) as error:
        # The library raises these for a wrong key, value, file or checkpoint, and for a run that diverged.
        # Anything else is our own mistake, and its traceback is wanted.
        if _wants_tracebacks():
            raise
        print(f"recurra {words[0]}: {error}", file=sys.stderr)
        return FAILED


def _wants_tracebacks() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def usage() -> str:
    """List the commands, one per line."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: recurra COMMAND [ARGUMENTS]", "", *lines, "", "`recurra COMMAND --help` shows its arguments."]
    )
