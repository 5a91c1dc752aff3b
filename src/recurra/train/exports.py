"""Runs for other runtimes: an ONNX file with its tokenizer, and a static folder that runs in a browser."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from recurra.checks import require, sentence
from recurra.convert.export.page_files import PAGE, RUNTIME, WEBGPU, page_file
from recurra.convert.export.programs import gate_layers, require_exportable, state_tensors
from recurra.convert.portable import tokenizer_to_json
from recurra.data.vocabulary import Vocabulary
from recurra.files.writing import replacing
from recurra.models.shell import LanguageModelShell
from recurra.train.run import Run
from recurra.train.run_folder import RunFolder

# --- a text run as an ONNX file, with its tokenizer and a program that needs neither this package nor PyTorch ---


class OnnxExport(NamedTuple):
    """What was written.

    files: the ONNX file, its tokenizer and the program.
    difference: the largest difference between the graph's logits and the model's, over the largest logit.
    int8_difference: the same with matrices of 8-bit integers; None if they stayed float32.
    """

    files: tuple[Path, ...]
    difference: float
    int8_difference: float | None


def _onnx_files(path: Path) -> tuple[Path, ...]:
    """Name the three files of an export: FILE.onnx, FILE.tokenizer.json and FILE.py."""
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
    """
    files = _onnx_files(path)
    existing = [file for file in files if file.exists()]
    if existing and not force:
        got = f"{existing[0]}, which exists"
        raise FileExistsError(sentence("target", got, "another name", "--force overwrites it"))
    encoder = run.tokenizer  # first: only text runs have one
    model = require_exportable(run.model)
    try:
        from recurra.convert.export import onnx_file, run_file
        from recurra.convert.export.onnx_file import OnnxModel
        from recurra.convert.huggingface.tokenizer import fast_tokenizer
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


# --- runs as a static folder that runs in a browser: page, runtime, models and tokenizers ---


_BYTES = 4  # of a float32 number
_LARGEST_DIFFERENCE = {"int8": 5e-2, "float16": 1e-4, "float32": 1e-4}
"""Largest difference of a graph's outputs from its model's: about 1e-6, 1e-5 in deep models. With int8, an input
between two codes can be rounded to either, as another order of sums has it: then it is as large as the rounding."""


class WebExport(NamedTuple):
    """What was written.

    files: by their names in the folder, with their bytes. difference: the largest difference of logits and transitions
    between a graph and its model in Python with the same weights.
    """

    files: dict[str, int]
    difference: float


_WEBGPU_TOLERANCE = {"int8": 5e-2, "float16": 1e-3, "float32": 1e-3}
"""How far logits may lie from those of WebAssembly, relative to the largest, for the page to use WebGPU: its sines and
exponentials may be less exact than float32, and int8 can round an input the other way."""


def export_web(
    runs: Sequence[Run], folder: Path, *, weights: str = "int8", webgpu: bool = False, force: bool = False
) -> WebExport:
    """Write runs as a folder that any static host can serve, and compare their outputs first.

    Args:
        runs: runs over text or on Memory Horizon, of recurrent language models, with distinct names; the page opens the
            first one.
        folder: the folder to write.
        weights: "int8", "float16" or "float32".
        webgpu: add what runs models with WebGPU, 27 MB; the page uses it where it agrees with WebAssembly.
        force: write into a folder that is not empty.
    """
    names = [run.name for run in runs]
    require(bool(names) and len(set(names)) == len(names), "runs", ", ".join(names), "folders with distinct names")
    if RunFolder(folder).config.exists():  # whose tokenizer.json would be written over
        got = f"{folder}, which contains a run"
        raise FileExistsError(sentence("target", got, "another name", "a run is never overwritten"))
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(sentence("target", f"{folder}, which is a file", "the name of a folder"))
    if folder.is_dir() and any(folder.iterdir()) and not force:
        got = f"{folder}, which is not empty"
        raise FileExistsError(sentence("target", got, "another name", "--force writes into it"))
    for run in runs:
        _require_task(run)
    files = {name: page_file(name) for name in PAGE + RUNTIME + (WEBGPU if webgpu else ())}
    models, differences = [], []
    for number, run in enumerate(runs, 1):
        described, own_files, difference = _exported(run, weights, "" if number == 1 else f"-{number}")
        files |= own_files
        models.append(described)
        differences.append(difference)
    # last: a page without it says that the folder is not complete
    files["engine.json"] = json.dumps({"engine": "local", "webgpu": webgpu, "models": models}, indent=1).encode()
    for name, content in files.items():
        with replacing(folder / name) as file:
            file.write(content)
    return WebExport({name: len(content) for name, content in files.items()}, max(differences))


def _exported(run: Run, weights: str, suffix: str) -> tuple[dict[str, Any], dict[str, bytes], float]:
    """What the page has to know of a run, its files by name, and the largest difference of its outputs."""
    model = require_exportable(run.model)
    try:
        from recurra.convert.export.web import to_web_model, web_difference
    except ImportError as error:
        raise ValueError(f"the extra export is missing: pip install 'recurra[export]' ({error})") from error
    exported = to_web_model(model, weights)
    difference = web_difference(exported)
    if not difference <= _LARGEST_DIFFERENCE[weights]:
        raise ValueError(
            f"the outputs of the ONNX graph of {run.name} differ from the model's by {difference:.1e}, more than "
            f"{_LARGEST_DIFFERENCE[weights]:.0e}; nothing was written"
        )
    file, tokenizer = f"model{suffix}.onnx", f"tokenizer{suffix}.json"
    files = {file: exported.content}
    is_text = run.task.has_tokenizer()
    if is_text:
        files[tokenizer] = tokenizer_to_json(run.tokenizer).encode()
    digests = {name: sha256(content).hexdigest() for name, content in files.items()}
    described = _explored(run, model) | {
        "weights": weights,
        "file": file,
        "sha256": digests[file],
        "tokenizer": tokenizer if is_text else None,
        "tokenizer_sha256": digests.get(tokenizer),
        "tolerance": _WEBGPU_TOLERANCE[weights],
        "state": [{"name": tensor.name, "shape": [1, *tensor.shape]} for tensor in exported.state],
    }
    return described, files, difference


def _explored(run: Run, model: LanguageModelShell) -> dict[str, Any]:
    """Describe a run for the explorer, as JSON.

    The key-value cache is that of a Transformer with as many layers and channels: 2 float16 numbers per layer, channel
    and token.

    Args:
        run: a run over text or on Memory Horizon.
        model: its model, on the CPU in float32.
    """
    config: Any = model.config
    layers = gate_layers(model)
    return {
        "name": run.name,
        "task": _require_task(run),
        "vocab_size": config.vocab_size,
        "n_outputs": getattr(config, "output_size", None) or config.vocab_size,
        "n_layer": config.n_layer,
        "d_model": config.d_model,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": _BYTES * sum(_numbers(tensor.shape) for tensor in state_tensors(model)),
        "cache_bytes_per_token": 2 * 2 * config.n_layer * config.d_model,
        "gates": [{"layer": layer.layer, "channels": layer.channels} for layer in layers],
    }


def _require_task(run: Run) -> dict[str, Any]:
    """Say what a run's tokens are. Raises ValueError if the explorer has no view for them."""
    found = run.task.explored(run)
    if found is None:
        raise run.task.refusal(run, "over text or on Memory Horizon, which the explorer shows")
    return found


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
