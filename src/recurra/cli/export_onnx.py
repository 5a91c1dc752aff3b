"""`recurra export onnx`: write a run as an ONNX file, which runs without this package and without PyTorch."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.train.formats import OnnxExport, export_onnx
from recurra.train.run import open_run

_DESCRIPTION = """\
Write a text run as one ONNX file, FILE.onnx: tokens and state in, logits and state out, for any number of tokens and
streams. Beside it go its tokenizer, FILE.tokenizer.json, and FILE.py, a program that continues a text using onnxruntime
alone. Needs the extra export.

The logits are compared with the model's in onnxruntime before anything is put in place: they may differ by 1e-4 of the
largest. If the run has no tokenizer of its own, --data.path FOLDER says where its corpus is."""


def run(words: Sequence[str]) -> int:
    """Export, and print how much the logits differ."""
    own, overrides = split_overrides(words)
    parser = command_parser("export onnx", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="folder of a run of a recurrent language model")
    parser.add_argument("file", type=Path, metavar="FILE", help="file to write; must end in .onnx")
    add_checkpoint(parser, of="checkpoint to export")
    parser.add_argument("--int8", action="store_true", help="store matrices as 8-bit integers: smaller, but less exact")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    arguments = parser.parse_args(own)
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    print(_report(export_onnx(trained, arguments.file, int8=arguments.int8, force=arguments.force)))
    return 0


def _report(export: OnnxExport) -> str:
    """Report an export in lines."""
    lines = [f"the logits differ from the model's by {export.difference:.1e} of the largest at most"]
    if export.int8_difference is not None:
        lines.append(f"with matrices of 8-bit integers, by {export.int8_difference:.1e}")
    return "\n".join([*lines, f"wrote {', '.join(map(str, export.files))}"])
