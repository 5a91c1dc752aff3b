"""The files of weights, of exports and of published models: how each is written and read, and damaged with what."""

import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import recurra
from benchmarks.faults.binary_mutants import DAMAGES, NUMBERS, SAFETENSORS
from benchmarks.faults.mutants import JSON
from benchmarks.faults.outcomes import Kind
from recurra import convert
from recurra._files.reading import one_line
from recurra.convert import huggingface
from recurra.convert.export.onnx_file import OnnxModel, sealed, to_onnx
from recurra.convert.portable import PortableModel, load_single_file, read_weights, save_single_file, tokenizer_to_json
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.streams.stream import Stream


def weight_kinds() -> dict[str, Kind]:
    """Return these kinds by their names in the table."""
    return {**_single_files(), **_folders_of_ours(), **_published_folders()}


def small_model() -> PortableModel:
    """A language model with words."""
    torch.manual_seed(0)
    words = Vocabulary.from_text(["a cat and a dog\n"])
    config = LanguageModelConfig(vocab_size=len(words), n_layer=2, d_model=8, d_channel_mixing=8, mixer="min-gru")
    return PortableModel(LanguageModel(config).eval(), words, {"experiment": "text", "seed": 3}, 7)


def small_mamba() -> PortableModel:
    """A model with byte pairs that transformers and llama.cpp have classes for."""
    torch.manual_seed(0)
    pairs = BytePairEncoding.train(["the cat sat on a mat\nthe dog saw naïve 日本 cats\n" * 3], 270)
    shape = {"d_channel_mixing": 0, "norm": "rms", "biases": False, "norm_epsilon": 1e-5, "tie_embeddings": True}
    options = {"dt_rank": 2, "d_state": 4}
    config = LanguageModelConfig(len(pairs), None, 2, 8, mixer="mamba", mixer_options=options, **shape)
    return PortableModel(LanguageModel(config).eval(), pairs)


def content_of(model: PortableModel) -> Any:
    """All that reading a model tells."""
    tokenizer = None if model.tokenizer is None else tokenizer_to_json(model.tokenizer)
    return model.model.state_dict(), asdict(model.model.config), tokenizer, model.experiment, model.step


# --- single files ---


def _write_stream(path: Path) -> None:
    stream = Stream(small_model().model)
    stream.feed([1, 2, 3])
    stream.save(path)


def _read_stream(path: Path) -> Any:
    stream = Stream(small_model().model)
    stream.load(path)
    return list(tensors(stream.state)), stream.logits, stream.recent, stream.position


def _write_foreign(path: Path) -> None:
    torch.save({"a": torch.arange(64.0), "b": torch.ones(64)}, path)


def write_onnx(path: Path) -> None:
    """Write a model as an ONNX file."""
    model = small_model()
    tokenizer = huggingface.fast_tokenizer(model.tokenizer).backend_tokenizer.to_str()
    path.write_bytes(sealed(to_onnx(model.model, tokenizer=tokenizer).SerializeToString()))


def _read_onnx(path: Path) -> Any:
    model = OnnxModel(path, threads=1)
    logits, state = model(np.array([[1, 2, 3]]))
    return torch.from_numpy(logits), {name: torch.from_numpy(part) for name, part in state.items()}, model.metadata


def _single_files() -> dict[str, Kind]:
    return {
        "single file": Kind(
            "model.safetensors",
            lambda p: save_single_file(small_model(), p),
            lambda p: content_of(load_single_file(p)),
            SAFETENSORS,
        ),
        "saved stream": Kind("stream", _write_stream, _read_stream, SAFETENSORS),
        "weights of others": Kind("weights.pt", _write_foreign, read_weights, DAMAGES, digest=False),
        "GGUF": Kind(
            "model.gguf",
            lambda p: convert.to_gguf(small_mamba(), p, dtype="f32"),
            lambda p: content_of(from_huggingface(p)),
            NUMBERS,
            digest=False,
        ),
        "ONNX": Kind("model.onnx", write_onnx, _read_onnx, DAMAGES),
    }


# --- folders ---

_OURS = ("model.safetensors", "config.json", "generation_config.json", "manifest.json")
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_SHARD, _INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


def _mutants_of(name: str) -> Any:
    return SAFETENSORS if name.endswith(".safetensors") else JSON if name.endswith(".json") else DAMAGES


def _in_folder(files: tuple[str, ...], label: str, write: Callable, read: Callable, **options: Any) -> dict[str, Kind]:
    """A kind for each of these files of a folder, which `write` makes and `read` reads as a whole."""
    kinds = {}
    for name in files:
        kinds[f"{label}, {name}"] = Kind(
            f"folder/{name}", lambda p: write(p.parent), lambda p: read(p.parent), _mutants_of(name), **options
        )
    return kinds


def _save_shards(folder: Path) -> None:
    model = huggingface.causal_lm(small_model().model)
    model.save_pretrained(folder, max_shard_size=sum(x.nbytes for x in model.state_dict().values()) * 2 // 3)
    assert (folder / _SHARD).is_file()


def _load_by_transformers(folder: Path) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except (TypeError, RecursionError, ValueError, OSError) as error:
        ours = str(Path(recurra.__file__).parent)
        if any(frame.filename.startswith(ours) for frame in traceback.extract_tb(error.__traceback__)):
            raise
        # of a config.json in which transformers finds no class of ours that it could ask
        raise ValueError(f"{folder}: transformers says {one_line(error)}") from error
    return model.state_dict(), asdict(model.model.config), type(model).__name__


def _folders_of_ours() -> dict[str, Kind]:
    def load(folder: Path) -> Any:
        return content_of(huggingface.load_folder(folder))

    def save(folder: Path) -> None:
        huggingface.save_folder(small_model(), folder)

    return {
        **_in_folder((*_OURS, *_OF_TOKENIZERS), "folder for transformers", save, load),
        **_in_folder(_OURS, "the same, read by transformers", save, _load_by_transformers),
        **_in_folder((_SHARD, _INDEX), "folder for transformers in shards", _save_shards, load),
        **_in_folder(
            (_SHARD, _INDEX), "the same, in shards, read by transformers", _save_shards, _load_by_transformers
        ),
    }


def _write_published(folder: Path) -> None:
    to_huggingface(small_mamba(), folder)


def _write_bin(folder: Path) -> None:
    """As the authors of Mamba publish their models: weights in a file of torch.save."""
    _write_published(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _write_published_shards(folder: Path) -> None:
    _write_published(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=sum(x.nbytes for x in model.parameters()) * 2 // 3)


def _published_folders() -> dict[str, Kind]:
    def read(folder: Path) -> Any:
        return content_of(from_huggingface(folder))

    files = ("config.json", "model.safetensors", "tokenizer.json")
    return {
        **_in_folder(files, "published folder", _write_published, read, digest=False),
        **_in_folder(("pytorch_model.bin",), "published folder", _write_bin, read, digest=False),
        **_in_folder((_SHARD, _INDEX), "published folder in shards", _write_published_shards, read, digest=False),
    }
