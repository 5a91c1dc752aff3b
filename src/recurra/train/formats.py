"""The formats of a trained language model on disk: how each is recognised, read and written.

run           a folder that `recurra train` writes: config.yaml, tokenizer.json, checkpoints/
hf            a folder that transformers loads: config.json, model.safetensors, tokenizer.json
safetensors   one file, with its configuration and tokenizer in the metadata
published     a folder that transformers loads with a class of its own, such as MambaForCausalLM, or RWKV-7's .pth file
gguf          a file that llama.cpp reads
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recurra import convert
from recurra._choices import Format, GgufType
from recurra._files.digests import STAMP
from recurra._files.writing import put_in_place, replace_files
from recurra._process import return_free_memory
from recurra.checks import require, require_literal, sentence
from recurra.convert.export._page_files import MODULE, PAGE, RUNTIME, WEBGPU, page_file
from recurra.convert.export.programs import gate_layers, require_exportable, state_tensors
from recurra.convert.portable import (
    PortableModel,
    Probe,
    load_single_file,
    probe,
    readable_elsewhere,
    require_equal,
    save_single_file,
    tokenizer_to_json,
)
from recurra.convert.published.folder import (
    ARCHITECTURES,
    from_huggingface,
    model_type_of,
    to_huggingface,
    without_unused_tokens,
)
from recurra.data.tokenizers import Vocabulary
from recurra.models.registry import entry_of
from recurra.streams.continuation import TextEncoder, start_of
from recurra.train.adapters import LoraConfig
from recurra.train.experiment import to_plain
from recurra.train.recipe import load_recipe
from recurra.train.run import Run, open_run
from recurra.train.run_folder import RunFolder
from recurra.train.shipped import save_run
from recurra.train.task import experiment_name, find_task

SUFFIXES = {".safetensors": "safetensors", ".gguf": "gguf"}
"""The formats that are one file."""


def _format_of(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(sentence("model", f"{path}, which does not exist", "a file or folder"))
    if path.is_file() and path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    if path.is_file() and path.suffix == ".pth":
        return "published"
    if RunFolder(path).config.is_file():
        return "run"
    if (path / "config.json").is_file():
        return "published" if model_type_of(path) in ARCHITECTURES else "hf"
    files = " or ".join(SUFFIXES)
    expected = f"a run (a folder with config.yaml), a folder for transformers (with config.json) or a {files} file"
    raise ValueError(sentence("model", str(path), expected))


def convert_model(
    source: Path,
    target: Path,
    to: str,
    *,
    checkpoint: str = "best",
    overrides: Sequence[str] = (),
    force: bool = False,
    stored: GgufType = "f32",
    dtype: torch.dtype | None = None,
) -> float:
    """Write the model at `source` in another format, and compare the logits of both before it is put in place.

    Only one model is in memory at a time: the source's logits are computed, its weights are written and freed, and the
    result is read back.

    Args:
        source: a model in any format.
        target: the folder or file to write.
        to: one of `FORMATS`.
        checkpoint, overrides: for a source that is a run, as in `open_run`.
        force: write into a folder that is not empty, or over a file. A run is never overwritten.
        stored: for gguf, what matrices are rounded to; logits may then differ by any amount.
        dtype: the precision of the weights and of both models' logits. None: the source's own if it is a run or a
            safetensors file, else float32, which represents all published weights exactly.

    Returns:
        the largest difference between the logits.
    """
    if to == _format_of(source) and dtype is None and not (to == "run" and _has_adapters(source)):
        got = f"{source}, which has the format {to} already"
        raise ValueError(sentence("source", got, "a model in another one, or another precision"))
    if target.resolve() == source.resolve():
        raise ValueError(sentence("target", f"{target}, which is the source", "another name"))
    require_literal(Format, to=to)
    portable = _read_model(source, checkpoint=checkpoint, overrides=overrides, dtype=dtype)
    expected, tokenizer = probe(portable.model), portable.tokenizer
    occupied = _require_free(to, target, force)
    with put_in_place(target) as scratch:
        if to == "run":
            _save_run(portable, scratch, target=target, source=source)
        else:
            writers: dict[str, Callable[..., object]] = {
                "safetensors": save_single_file,
                "published": partial(to_huggingface, in_place=True),
                "gguf": partial(convert.to_gguf, dtype=stored, in_place=True),
            }
            (writers.get(to) or _huggingface().save_folder)(portable, scratch)
        del portable
        return_free_memory()
        difference = _require_same(
            expected, tokenizer, _read_model(scratch, to, dtype=expected.dtype), target, rounded=stored != "f32"
        )
        if tokenizer is None and target.is_dir() and (target / "tokenizer.json").exists():
            got = "that of another model, and the new one has none"
            raise ValueError(sentence(f"the tokenizer in {target}", got, "a folder without one", "nothing was written"))
    # Files that were there before may be read together with the new ones.
    if occupied and target.is_dir():
        written = _read_model(target, dtype=expected.dtype)
        difference = _require_same(expected, tokenizer, written, target, "files that were there before remain")
    return difference


def _read_model(
    path: Path,
    found: str | None = None,
    *,
    checkpoint: str = "best",
    overrides: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> PortableModel:
    """Read a model in any format; `checkpoint` and `overrides` are for runs, as in `open_run`."""
    found = found or _format_of(path)
    if found != "run" and (overrides or checkpoint != "best"):
        hint = "--checkpoint and values of a recipe are for runs"
        raise ValueError(sentence("model", f"{path}, a model in the format {found}", "a run", hint))
    if found in ("published", "gguf"):
        return without_unused_tokens(from_huggingface(path, dtype=dtype or torch.float32))
    if found == "hf":
        portable: PortableModel = _huggingface().load_folder(path)
    elif found == "safetensors":
        portable = load_single_file(path)
    else:
        portable = _read_run(path, checkpoint, overrides)
    return portable if dtype is None else portable._replace(model=portable.model.to(dtype))


def _read_run(path: Path, checkpoint: str, overrides: Sequence[str]) -> PortableModel:
    run = open_run(path, checkpoint=checkpoint, overrides=overrides)
    tokenizer = readable_elsewhere(run.tokenizer)  # first: only text runs have one
    experiment = run.experiment
    if tokenizer is not run.tokenizer:
        experiment = replace(experiment, data=replace(experiment.data, vocabulary="bpe", bpe_vocab_size=len(tokenizer)))
    if experiment.lora.rank is not None:  # they are merged
        experiment = replace(experiment, init_from=None, lora=LoraConfig())
    return PortableModel(run.model, tokenizer, to_plain(experiment), run.step, run.folder.read_chat_template())


def _has_adapters(run: Path) -> bool:
    return load_recipe(RunFolder(run).config).lora.rank is not None


def _require_same(
    expected: Probe,
    tokenizer: TextEncoder | None,
    written: PortableModel,
    target: Path,
    hint: str = "nothing was written",
    *,
    rounded: bool = False,
) -> float:
    if _plain_tokenizer(tokenizer) != _plain_tokenizer(written.tokenizer):
        raise ValueError(sentence(f"the tokenizer in {target}", "another one", "the model's", hint))
    return require_equal(expected, written.model, f"{target}", rounded=rounded)


def _plain_tokenizer(tokenizer: TextEncoder | None) -> dict[str, Any] | None:
    """The tokenizer as plain data. Of what adds tokens to a text, which transformers may word otherwise, the tokens."""
    if tokenizer is None:
        return None
    content: dict[str, Any] = json.loads(tokenizer_to_json(tokenizer))
    if "model" in content:  # the digest of byte pairs depends on the rest
        del content["model"][STAMP]
    return {**content, "post_processor": start_of(tokenizer)}


def _require_free(to: str, target: Path, force: bool) -> bool:
    """Tell whether there is something that may be overwritten; refuse what may not."""
    if RunFolder(target).config.exists():
        got = f"{target}, which contains a run"
        raise FileExistsError(sentence("target", got, "another name", "a run is never overwritten"))
    if target.exists() and target.is_dir() == (to in SUFFIXES.values()):
        found, wanted = ("folder", "file") if target.is_dir() else ("file", "folder")
        raise FileExistsError(sentence("target", f"{target}, which is a {found}", f"the name of a {wanted}"))
    occupied = target.is_file() or (target.is_dir() and any(target.iterdir()))
    if occupied and not force:
        what = "exists" if target.is_file() else "is not empty"
        raise FileExistsError(sentence("target", f"{target}, which {what}", "another name", "--force overwrites it"))
    return occupied


def _huggingface() -> Any:
    try:
        import recurra.convert.huggingface
    except ImportError as error:
        raise ValueError(f"the package transformers is missing: pip install 'recurra[hf]' ({error})") from error
    return recurra.convert.huggingface


# --- runs ---


def _save_run(portable: PortableModel, path: Path, *, target: Path, source: Path) -> None:
    if portable.tokenizer is None:
        raise ValueError(sentence("source", f"{source}, which has no tokenizer", "a model with one, as a run has"))
    lines = [
        f"Made by `recurra convert` from {source}.",
        "Without the optimiser's state this run can be evaluated and generated from, not resumed. It has no log.",
    ]
    if portable.experiment is None:
        lines += [
            "How the model was trained is not known. The values of `model`, `data.vocabulary` and, if the model has",
            "segments, `data.segment_length` are the model's own; all others are defaults, not what it was trained",
            "with. To evaluate it, name a corpus with --data.path FOLDER; it is read with `data.tokenizer`.",
        ]
    experiment = portable.experiment or _unknown_experiment(portable, target)
    save_run(portable._replace(experiment=experiment), path, lines, source=str(source))


def _unknown_experiment(portable: PortableModel, target: Path) -> dict[str, Any]:
    """The part of an experiment that the model itself tells: its shape and its vocabulary."""
    entry = entry_of(portable.model)
    config: Any = portable.model.config
    words = "words" if type(portable.tokenizer).__name__ == "Vocabulary" else "bpe"
    data = {
        "path": "unknown",
        "vocabulary": words,
        # A corpus is then read with the model's vocabulary instead of one of its own.
        "tokenizer": str(RunFolder(target).tokenizer.resolve()),
    }
    if hasattr(config, "segment_length"):
        data["segment_length"] = config.segment_length
    return {"experiment": experiment_name(find_task("text"), entry), "data": data, "model": config.without_sizes()}


# --- ONNX, with the tokenizer and a program that needs neither this package nor PyTorch ---


class OnnxExport(NamedTuple):
    """The files, and the largest difference of logits over the largest logit: in float32, and in int8 if asked for."""

    files: tuple[Path, ...]
    difference: float
    int8_difference: float | None


def export_onnx(run: Run, path: Path, *, int8: bool = False, force: bool = False) -> OnnxExport:
    """Write a text run as ONNX, and compare the logits with the model's in onnxruntime before anything is put in place.

    Args:
        run: a run of a recurrent language model.
        path: the ONNX file; the tokenizer and the program are written beside it.
        int8: store matrices as 8-bit integers, which is smaller and less exact.
        force: overwrite files that exist.
    """
    if path.suffix != ".onnx":
        raise ValueError(sentence("FILE", str(path), "a name that ends in .onnx"))
    files = path, path.with_suffix(".tokenizer.json"), path.with_suffix(".py")
    existing = [file for file in files if file.exists()]
    if existing and not force:
        got = f"{existing[0]}, which exists"
        raise FileExistsError(sentence("target", got, "another name", "--force overwrites it"))
    encoder = readable_elsewhere(run.tokenizer)  # first: only text runs have one
    model = require_exportable(run.model)
    try:
        from recurra.convert.export import _run_file as run_file
        from recurra.convert.export import onnx_file
        from recurra.convert.export.onnx_file import OnnxModel
        from recurra.convert.huggingface.folder import fast_tokenizer
    except ImportError as error:
        raise ValueError(f"the extra export is missing: pip install 'recurra[export]' ({error})") from error

    tokenizer = fast_tokenizer(encoder).backend_tokenizer.to_str()
    if isinstance(encoder, Vocabulary):  # in a run, <eos> is a word like any other, and no special token
        tokenizer = json.dumps(json.loads(tokenizer) | {"added_tokens": []}, ensure_ascii=False)
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
    written = onnx_file.sealed(content.SerializeToString()), tokenizer.encode(), Path(run_file.__file__).read_bytes()
    replace_files(dict(zip(reversed(files), reversed(written))))
    return OnnxExport(files, difference, int8_difference)


# --- a static folder that runs in a browser ---

_LARGEST_DIFFERENCE = {"int8": 5e-2, "float16": 1e-4, "float32": 1e-4}
"""Largest difference of a graph's outputs from its model's: about 1e-6, 1e-5 in deep models. With int8, an input
between two codes can be rounded to either, as another order of sums has it: then it is as large as the rounding."""


class WebExport(NamedTuple):
    """The files' sizes by name, and the largest difference between the outputs of a graph and its model in Python."""

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
    _require_free("web", folder, force)  # a run's tokenizer.json would be written over
    for run in runs:
        _require_task(run)
    files = {name: page_file(name) for name in PAGE + RUNTIME + MODULE + (WEBGPU if webgpu else ())}
    models, differences = [], []
    for number, run in enumerate(runs, 1):
        described, own_files, difference = _exported(run, weights, "" if number == 1 else f"-{number}")
        files |= own_files
        models.append(described)
        differences.append(difference)
    # last: a page without it says that the folder is not complete
    files["engine.json"] = engine_file({"engine": "local", "webgpu": webgpu, "models": models})
    replace_files({folder / name: content for name, content in files.items()})
    return WebExport({name: len(content) for name, content in files.items()}, max(differences))


def engine_file(content: dict[str, Any]) -> bytes:
    """Write engine.json with the digest of its text, in which that is empty, as the page computes it."""
    text = json.dumps({**content, STAMP: ""}, indent=1)
    return text.replace(f'"{STAMP}": ""', f'"{STAMP}": "{sha256(text.encode()).hexdigest()}"').encode()


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
    if is_text := run.task.has_tokenizer():
        files[tokenizer] = tokenizer_to_json(run.tokenizer).encode()
    digests = {name: sha256(content).hexdigest() for name, content in files.items()}
    config: Any = model.config
    described = {
        "name": run.name,
        "task": _require_task(run),
        "vocab_size": config.vocab_size,
        "n_outputs": getattr(config, "output_size", None) or config.vocab_size,
        "n_layer": config.n_layer,
        "d_model": config.d_model,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": 4 * sum(math.prod(tensor.shape) for tensor in state_tensors(model)),
        "cache_bytes_per_token": 2 * 2 * config.n_layer * config.d_model,
        "gates": [{"layer": layer.layer, "channels": layer.channels} for layer in gate_layers(model)],
        "weights": weights,
        "file": file,
        "sha256": digests[file],
        "tokenizer": tokenizer if is_text else None,
        "tokenizer_sha256": digests.get(tokenizer),
        "tolerance": _WEBGPU_TOLERANCE[weights],
        "state": [{"name": tensor.name, "shape": [1, *tensor.shape]} for tensor in exported.state],
    }
    return described, files, difference


def _require_task(run: Run) -> dict[str, Any]:
    """Say what a run's tokens are. Raises ValueError if the explorer has no view for them."""
    found = run.task.explored(run)
    if found is None:
        raise run.task.refusal(run, "over text or on Memory Horizon, which the explorer shows")
    return found
