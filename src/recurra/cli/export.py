"""`recurra export`: write a trained run in a format that other programs load, with a sub-command for each."""

import sys
from collections.abc import Sequence
from importlib import import_module

_EXPORTS = {
    "hf": ("recurra.cli.export_hf", "a folder that transformers loads"),
    "onnx": ("recurra.cli.export_onnx", "a file that onnxruntime runs"),
    "web": ("recurra.cli.export_web", "a folder for a static host that runs inside the browser"),
}


def run(words: Sequence[str]) -> int:
    """Run the sub-command."""
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] not in _EXPORTS:
        print(f"recurra export: unknown format {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    return int(import_module(_EXPORTS[words[0]][0]).run(words[1:]))


def _usage() -> str:
    """List the sub-commands, one per line."""
    width = max(map(len, _EXPORTS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in _EXPORTS.items()]
    return "\n".join(
        [
            "usage: recurra export FORMAT RUN ...",
            "",
            *lines,
            "",
            "`recurra export FORMAT --help` shows its arguments.",
        ]
    )
