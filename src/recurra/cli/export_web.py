"""`recurra export web`: write a run as a folder for a static host, where it runs inside the browser."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.runs import open_run
from recurra.runs.web_export import WebExport, export_web

DESCRIPTION = """\
Write a run as a folder that any static host serves: the explorer's page, the model's step as an ONNX file, its
tokenizer, and onnxruntime-web, which runs the step inside the browser in constant memory. No server is needed, and
nothing leaves the page. Takes runs over text and on Memory Horizon. Needs the extra export.

The outputs are compared with those of a model in Python with the same weights before anything is written.

To look at it: python -m http.server --directory FOLDER --bind 127.0.0.1"""


def run(words: Sequence[str]) -> int:
    """Export, and print what was written."""
    own, overrides = split_overrides(words)
    parser = command_parser("export web", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="folder of a run of a recurrent language model")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write")
    add_checkpoint(parser, of="checkpoint to export")
    parser.add_argument(
        "--weights",
        choices=("int8", "float16", "float32"),
        default="int8",
        help="how weights are stored: int8 rounds as `recurra generate --weights int8` does (default), float16 rounds "
        "all matrices, float32 none",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    arguments = parser.parse_args(own)
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    print(
        report(
            export_web(trained, arguments.folder, weights=arguments.weights, force=arguments.force), arguments.folder
        )
    )
    return 0


def report(export: WebExport, folder: Path) -> str:
    """Report an export in lines."""
    model, total = export.files["model.onnx"] / 1e6, sum(export.files.values()) / 1e6
    return "\n".join(
        [
            f"the outputs differ from the model's by {export.difference:.1e} at most",
            f"wrote {folder}: {total:.1f} MB, of which the model takes {model:.1f}",
            f"to look at it: python -m http.server --directory {folder} --bind 127.0.0.1",
        ]
    )
