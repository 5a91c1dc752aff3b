"""`recurra export web`: write runs as a folder for a static host, where they run inside the browser."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.train.formats import WebExport, export_web
from recurra.train.run import open_run

_DESCRIPTION = """\
Write one or more runs as a folder that any static host serves: the explorer's page, each model's step as an ONNX
file, its tokenizer, and onnxruntime-web, which runs the steps inside the browser in constant memory. No server is
needed, and nothing leaves the page. Takes runs over text and on Memory Horizon. Needs the extra export.

The outputs are compared with those of a model in Python with the same weights before anything is written.

To look at it: python -m http.server --directory FOLDER --bind 127.0.0.1"""


def run(words: Sequence[str]) -> int:
    """Export, and print what was written."""
    own, overrides = split_overrides(words)
    parser = command_parser("export web", _DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs of recurrent language models")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write")
    add_checkpoint(parser, of="checkpoint to export")
    parser.add_argument(
        "--weights",
        choices=("int8", "float16", "float32"),
        default="int8",
        help="how weights are stored: int8 rounds as `recurra generate --weights int8` does (default), float16 rounds "
        "all matrices, float32 none",
    )
    parser.add_argument(
        "--webgpu",
        action="store_true",
        help="add what runs models with WebGPU, 27 MB: the page uses it where its outputs agree with WebAssembly's",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    arguments = parser.parse_args(own)
    runs = [open_run(run, checkpoint=arguments.checkpoint, overrides=overrides) for run in arguments.runs]
    export = export_web(
        runs, arguments.folder, weights=arguments.weights, webgpu=arguments.webgpu, force=arguments.force
    )
    print(_report(export, arguments.folder))
    return 0


def _report(export: WebExport, folder: Path) -> str:
    """Report an export in lines."""
    models = [n_bytes for name, n_bytes in export.files.items() if name.endswith(".onnx")]
    taken = f"the model takes {sum(models) / 1e6:.1f}" if len(models) == 1 else f"models take {sum(models) / 1e6:.1f}"
    return "\n".join(
        [
            f"the outputs differ from those in Python by {export.difference:.1e} at most",
            f"wrote {folder}: {sum(export.files.values()) / 1e6:.1f} MB, of which {taken}",
            f"to look at it: python -m http.server --directory {folder} --bind 127.0.0.1",
        ]
    )
