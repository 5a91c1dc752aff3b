"""`recurra export onnx`: a run as an ONNX file, which runs without this package and without PyTorch."""

import json
from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.data.files import replacing
from recurra.export.exportable import require_exportable
from recurra.runs import open_run

DESCRIPTION = """\
Write a run over text as one ONNX file, FILE.onnx: tokens and state in, logits and state out, for any number of tokens
and of streams. Beside it lie its tokenizer, FILE.tokenizer.json, and a program that goes on with a text in onnxruntime
alone, FILE.py. The logits are compared with the model's in onnxruntime before anything is put in its place: they may
differ by 1e-4 of the largest. Needs the extra export. With --data.path FOLDER a run that has no tokenizer of its own
finds its corpus."""


def run(words: Sequence[str]) -> int:
    """Export, and say how much the logits differ."""
    own, overrides = split_overrides(words)
    parser = command_parser("export onnx", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the run's folder; of a recurrent language model")
    parser.add_argument("file", metavar="FILE", help="the file to write; ends in .onnx")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    parser.add_argument("--int8", action="store_true", help="keep the matrices as 8-bit integers: smaller, less exact")
    parser.add_argument("--force", action="store_true", help="write over files that are there")
    arguments = parser.parse_args(own)
    path = Path(arguments.file)
    files = _files(path, force=arguments.force)
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    encoder = trained.tokenizer  # first: only runs over text have one
    model = require_exportable(trained.model)
    try:
        from recurra.export import onnx_file, run_file
        from recurra.export.onnx_model import OnnxModel
        from recurra.huggingface.tokenizer import fast_tokenizer
    except ImportError as error:
        raise ValueError(f"this needs the packages of the extra: pip install 'recurra[export]' ({error})") from error

    tokenizer = _words_like_others(fast_tokenizer(encoder).backend_tokenizer.to_str())
    content = onnx_file.to_onnx(model, tokenizer=tokenizer)
    difference = onnx_file.largest_difference(model, OnnxModel(content.SerializeToString()))
    if not difference <= onnx_file.LARGEST_DIFFERENCE:
        raise ValueError(
            f"the logits of the ONNX graph differ from the model's by {difference:.1e} of the largest, more than "
            f"{onnx_file.LARGEST_DIFFERENCE:.0e}; nothing was written"
        )
    lines = [f"the logits differ from the model's by {difference:.1e} of the largest at most"]
    if arguments.int8:
        content = onnx_file.to_int8(content)
        difference = onnx_file.largest_difference(model, OnnxModel(content.SerializeToString()))
        lines.append(f"with matrices of 8-bit integers, by {difference:.1e}")
    written = content.SerializeToString(), tokenizer.encode(), Path(run_file.__file__).read_bytes()
    for file, data in zip(files, written):
        with replacing(file) as opened:
            opened.write(data)
    print("\n".join([*lines, f"wrote {', '.join(map(str, files))}"]))
    return 0


def _files(path: Path, *, force: bool) -> list[Path]:
    if path.suffix != ".onnx":
        raise ValueError(f"FILE is {path}; expected a name that ends in .onnx")
    files = [path, path.with_suffix(".tokenizer.json"), path.with_suffix(".py")]
    there = [file for file in files if file.exists()]
    if there and not force:
        raise FileExistsError(f"{there[0]} exists; choose another name, or overwrite what is there with --force")
    return files


def _words_like_others(tokenizer: str) -> str:
    """A tokenizer's JSON without special tokens: <eos> is a word like others, as in a run."""
    return json.dumps(json.loads(tokenizer) | {"added_tokens": []}, ensure_ascii=False)
