"""A text run as an ONNX file, with its tokenizer and a program that needs neither this package nor PyTorch."""

import json
from pathlib import Path
from typing import NamedTuple

from recurra.checks import sentence
from recurra.data import Vocabulary
from recurra.export.exportable import require_exportable
from recurra.files.writing import replacing
from recurra.runs.run import Run


class OnnxExport(NamedTuple):
    """What was written.

    files: the ONNX file, its tokenizer and the program.
    difference: the largest difference between the graph's logits and the model's, over the largest logit.
    int8_difference: the same with matrices of 8-bit integers; None if they stayed float32.
    """

    files: tuple[Path, ...]
    difference: float
    int8_difference: float | None


def onnx_files(path: Path) -> tuple[Path, ...]:
    """Name the three files of an export: FILE.onnx, FILE.tokenizer.json and FILE.py.

    Raises:
        ValueError: `path` does not end in .onnx.
    """
    if path.suffix != ".onnx":
        raise ValueError(sentence("FILE", str(path), "a name that ends in .onnx"))
    return path, path.with_suffix(".tokenizer.json"), path.with_suffix(".py")


def export_onnx(run: Run, path: Path, *, int8: bool = False, force: bool = False) -> OnnxExport:
    """Write a text run as ONNX, and compare the logits with the model's in onnxruntime before anything is put in place.

    Args:
        run: a run of a recurrent language model.
        path: the ONNX file; the tokenizer and the program are written beside it.
        int8: store matrices as 8-bit integers, which is smaller and less exact.
        force: overwrite files that exist.

    Raises:
        FileExistsError: one of the files exists.
        ValueError: the name does not end in .onnx; the run is not over text, or its model cannot be exported; a package
            is missing; or the logits differ by more than 1e-4 of the largest.
    """
    files = onnx_files(path)
    existing = [file for file in files if file.exists()]
    if existing and not force:
        came = f"{existing[0]}, which exists"
        raise FileExistsError(sentence("target", came, "another name", "--force overwrites it"))
    encoder = run.tokenizer  # first: only text runs have one
    model = require_exportable(run.model)
    try:
        from recurra.export import onnx_file, run_file
        from recurra.export.onnx_model import OnnxModel
        from recurra.huggingface.tokenizer import fast_tokenizer
    except ImportError as error:
        raise ValueError(f"the extra export is missing: pip install 'recurra[export]' ({error})") from error

    tokenizer = fast_tokenizer(encoder).backend_tokenizer.to_str()
    if isinstance(encoder, Vocabulary):
        tokenizer = _without_special_tokens(tokenizer)
    content = onnx_file.to_onnx(model, tokenizer=tokenizer)
    difference = onnx_file.largest_difference(model, OnnxModel(content.SerializeToString()))
    if not difference <= onnx_file.LARGEST_DIFFERENCE:
        raise ValueError(
            f"the logits of the ONNX graph differ from the model's by {difference:.1e} of the largest, more than "
            f"{onnx_file.LARGEST_DIFFERENCE:.0e}; nothing was written"
        )
    int8_difference = None
    if int8:
        content = onnx_file.to_int8(content)
        int8_difference = onnx_file.largest_difference(model, OnnxModel(content.SerializeToString()))
    written = content.SerializeToString(), tokenizer.encode(), Path(run_file.__file__).read_bytes()
    for file, data in zip(files, written):
        with replacing(file) as opened:
            opened.write(data)
    return OnnxExport(files, difference, int8_difference)


def _without_special_tokens(tokenizer: str) -> str:
    """Strip the JSON of words of its special tokens: as in a run, <eos> is a word like any other."""
    return json.dumps(json.loads(tokenizer) | {"added_tokens": []}, ensure_ascii=False)
