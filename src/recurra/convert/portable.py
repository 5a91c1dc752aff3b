"""A trained language model independent of its run: the common part of all formats on disk."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recurra._files.digests import content_digest
from recurra._files.reading import parse_json
from recurra._files.weights import read_safetensors, require_finite, shape_difference, write_safetensors
from recurra._files.writing import replacing
from recurra.checks import sentence
from recurra.data.tokenizers import ByteEncoder, BytePairEncoding, Vocabulary
from recurra.layers.experts import Router
from recurra.layers.feed_forward import LinearWeights
from recurra.models.registry import DataSizes, Undrawn, entry_of, list_models, on_meta
from recurra.streams.continuation import TextEncoder

_LARGEST_DIFFERENCE = 1e-5
"""Largest difference of a model's logits after conversion, in float32."""
_LARGEST_SHARE = 0.02
"""The same in bfloat16, relative to the largest logit."""


class PortableModel(NamedTuple):
    """A language model and its known metadata.

    tokenizer: the run's; None if there is none.
    experiment: the run's whole experiment as plain data; None if the model does not come from a run.
    step: the update after which the weights were saved; None in the same case.
    chat_template: a Jinja template in transformers' format; None if there is none.
    """

    model: nn.Module
    tokenizer: TextEncoder | None
    experiment: dict[str, Any] | None = None
    step: int | None = None
    chat_template: str | None = None


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Map the later names of shared parameters to their first names."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            tied[name] = earlier
    return tied


def retie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie parameters again, as `tied_parameters` found them."""
    for name, first in tied.items():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, model.get_parameter(first))


def with_weights(
    outline: nn.Module, weights: Mapping[str, Tensor], make: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Give a model created `on_meta` these tensors as its weights, in their dtypes and without copies.

    make: creates the model in memory, for models with buffers that are not in their state dict.
    """
    if make is not None and not outline.state_dict().keys() >= {name for name, _ in outline.named_buffers()}:
        with torch.device("cpu"), Undrawn():
            outline = make()
    tied = tied_parameters(outline)
    outline.load_state_dict(weights, assign=True)
    retie(outline, tied)
    return outline


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter, its embedding."""
    return next(model.parameters()).dtype


def readable_elsewhere(tokenizer: TextEncoder) -> TextEncoder:
    """Return a tokenizer with the same tokens that other programs can read: bytes become byte pairs."""
    return tokenizer.as_byte_pairs() if isinstance(tokenizer, ByteEncoder) else tokenizer


def tokenizer_to_json(tokenizer: TextEncoder) -> str:
    """Return a tokenizer as text."""
    tokenizer = readable_elsewhere(tokenizer)
    if not isinstance(tokenizer, (Vocabulary, BytePairEncoding)):
        raise ValueError(sentence("the tokenizer", f"a {type(tokenizer).__name__}", "a Vocabulary or BytePairEncoding"))
    return tokenizer.to_json()


class Probe(NamedTuple):
    """A model's logits, to be compared with another model's after the first one has been freed.

    tokens: (2, L), random, longer than two segments. logits: (2, L, V).
    """

    tokens: Int[Tensor, "2 L"]
    logits: Float[Tensor, "2 L V"]
    vocab_size: int
    dtype: torch.dtype


@torch.inference_mode()
def probe(model: nn.Module) -> Probe:
    """Return the logits that `require_equal` compares with those of another model."""
    config: Any = model.config
    length = min(512, 3 + 2 * getattr(config, "segment_length", 64))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, length), generator=generator, device="cpu")
    return Probe(tokens, model(tokens)[0], config.vocab_size, dtype_of(model))


@torch.inference_mode()
def require_equal(expected: Probe, other: nn.Module, what: str, *, rounded: bool = False) -> float:
    """Compare the logits of a model with those of another one, and return their largest difference.

    Refuses a difference above 1e-5 (in bfloat16: 2% of the largest logit, because intermediate values can round either
    way). If one of the models is `rounded`, any finite difference is accepted.
    """
    config: Any = other.config
    if config.vocab_size != expected.vocab_size:
        raise ValueError(f"the models have {expected.vocab_size} and {config.vocab_size} tokens")
    logits = other(expected.tokens)[0]
    pairs = zip(expected.logits.flatten(0, 1), logits.flatten(0, 1), strict=True)
    difference = float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max())
    most = _LARGEST_DIFFERENCE
    if expected.dtype == torch.bfloat16:
        most = max(most, _LARGEST_SHARE * float(expected.logits.abs().max()))
    most = sys.float_info.max if rounded else most
    if not difference <= most:
        raise ValueError(f"{what}: its logits differ from the model's by {difference:.1e}, more than {most:.0e}")
    return difference


_EXPECTED = "one that torch can read without running its code"
_CONTAINERS = ("model_state", "state_dict", "model")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a file of named weights: `.safetensors`, or a file written by torch.save (`.pyth`, `.bin`, `.pt`).

    Reading runs no code from the file. From a training checkpoint, only the weights are read: under `model_state` in
    those of TimeSformer's code, and otherwise under `state_dict` or `model`.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        weights, _ = read_safetensors(path, _EXPECTED)
    else:
        weights = _weights_of(_load_pickled(path), f"{path}")
    require_finite(weights, path)
    return weights


def _load_pickled(path: Path) -> Any:
    """Read what torch.save wrote, which only other code bases do, without running code of the file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))  # not of the old form
        for leaf in tree_leaves(content):
            # A tensor with strides of 0 can have any shape, and whoever copies it would allocate that.
            if isinstance(leaf, Tensor) and leaf.numel() * leaf.element_size() > path.stat().st_size:
                raise ValueError(f"a tensor of shape {tuple(leaf.shape)} is larger than the file")
    except Exception as error:  # whatever torch raises for content that it cannot read
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(sentence(str(path), f"no file of weights ({reason})", _EXPECTED)) from error
    return content


def _weights_of(content: Any, source: str) -> dict[str, Tensor]:
    """Return the weights by name, from a checkpoint or from a dictionary that holds nothing else."""
    for name in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    is_table = isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in content.items()
    )
    if not is_table:
        raise ValueError(
            f"{source} holds no weights by name; expected tensors, or a checkpoint with them under "
            f"{', '.join(_CONTAINERS)}"
        )
    return dict(content)


_FORMAT = "recurra model 2"
_WRITTEN = "a file that `recurra convert` wrote"


_SCALES = ".int8_scales"
"""What follows a matrix's name in the name of its scales, one for each row."""


def save_single_file(portable: PortableModel, path: str | Path, *, int8: bool = False) -> None:
    """Write a model as one safetensors file, completely or not at all; tied weights are stored once.

    int8: round float32 matrices to 8-bit integers with a float32 scale per row, a quarter of the size; they are
    converted back to float32 on reading.
    """
    description = {
        "format": _FORMAT,
        "model": entry_of(portable.model).model.__name__,
        "config": asdict(portable.model.config),  # type: ignore[call-overload]
        "experiment": portable.experiment,
        "step": portable.step,
    }
    tokenizer = None if portable.tokenizer is None else tokenizer_to_json(portable.tokenizer)
    tied = tied_parameters(portable.model)
    weights = {name: tensor for name, tensor in portable.model.state_dict().items() if name not in tied}
    weights = _rounded(weights, portable.model) if int8 else weights
    description["digest"] = content_digest({**description, "tokenizer": tokenizer}, weights)
    metadata = {"format": "pt", "recurra": json.dumps(description)}
    if tokenizer is not None:
        metadata["tokenizer"] = tokenizer
    with replacing(Path(path)) as file:
        write_safetensors(file, weights, metadata)


def load_single_file(path: str | Path) -> PortableModel:
    """Read a file written by `save_single_file`; the model is in evaluation mode and on the CPU."""
    path = Path(path)
    weights, metadata = read_safetensors(path, _WRITTEN)
    if "recurra" not in metadata:
        raise ValueError(sentence(str(path), "one that does not say which model its weights belong to", _WRITTEN))
    description = parse_json(metadata["recurra"], f"the description in {path}")
    if (found := description.get("format")) != _FORMAT:
        raise ValueError(sentence(str(path), f"in the format {found!r}", repr(_FORMAT)))
    text, digest = metadata.get("tokenizer"), description.pop("digest", None)
    if digest != content_digest({**description, "tokenizer": text}, weights):
        raise ValueError(sentence(str(path), "damaged: its content does not match its digest", _WRITTEN))
    weights = _restored(weights)
    require_finite(weights, path)
    model = _build(description, weights, path)
    tokenizer: TextEncoder | None = None
    if text is not None:
        kind = Vocabulary if "words" in parse_json(text, name := f"the tokenizer in {path}") else BytePairEncoding
        tokenizer = kind.from_json(text, name)
    return PortableModel(model.eval(), tokenizer, description["experiment"], description["step"])


def _rounded(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Replace the float32 matrices of linear layers and embeddings by int8, and add the scales of rows, (rows, 1).

    A scale takes a row's largest number to 127. Other matrices stay: decays and frequencies are no sums' factors, and a
    router chooses by small differences.
    """
    kinds = (nn.Linear, LinearWeights, nn.Embedding)
    layers = ((name, module) for name, module in model.named_modules() if not isinstance(module, Router))
    of_layers = {f"{name}.weight" for name, module in layers if isinstance(module, kinds)}
    rounded = dict(weights)
    for name in of_layers & weights.keys():
        matrix = weights[name]
        if matrix.dtype == torch.float32:
            scales = matrix.abs().amax(-1, keepdim=True) / 127
            rounded[name] = (matrix / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
            rounded[name + _SCALES] = scales
    return rounded


def _restored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `_rounded`; scales without a matrix stay, and are refused as weights that the model does not have."""
    restored = dict(weights)
    for name in weights:
        matrix = name.removesuffix(_SCALES)
        if matrix != name and matrix in weights:
            restored[matrix] = weights[matrix].float() * restored.pop(name)
    return restored


def _build(description: dict[str, Any], weights: dict[str, Tensor], path: Path) -> nn.Module:
    """Make the model and load the weights, which must be all of its own: the file has to be as large as the model."""
    entry = next((entry for entry in list_models(DataSizes) if entry.model.__name__ == description["model"]), None)
    if entry is None:
        raise ValueError(sentence(str(path), f"of a {description['model']}", "a model that this version knows"))
    try:
        config = entry.config(**description["config"])
        with on_meta():  # takes no memory, whatever the sizes
            outline = entry.model(config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    tied = tied_parameters(outline)
    weights = {**weights, **{name: weights[first] for name, first in tied.items() if first in weights}}
    if difference := shape_difference(outline, weights):
        got = f"one with other weights than its configuration says (it has {difference})"
        raise ValueError(sentence(str(path), got, _WRITTEN))
    # copies: what the library reads is a part of the file until it is touched
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    return with_weights(outline, weights, lambda: entry.model(config))
