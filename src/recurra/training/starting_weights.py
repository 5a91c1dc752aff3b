"""The weights that a video model starts from: a run's, the published TimeSformer's, or Hugging Face's port of it."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recurra.checks import sentence
from recurra.convert import read_weights, timesformer_from_huggingface, timesformer_from_original
from recurra.models import CompactRecurrentViT, TimeSformer, TimeSformerConfig, load_timesformer
from recurra.models.pi_vit import INDUCTION
from recurra.training.checkpoint import load_weights, scored_weights
from recurra.training.run_folder import is_checkpoint, load_best_checkpoint

_HEAD = ("head.weight", "head.bias")
_HUGGING_FACE_FILES = ("model.safetensors", "pytorch_model.bin")


class _Source(NamedTuple):
    """Weights by our names and in the sizes of the model, with a classifier for `n_classes` classes, or a fresh one."""

    weights: dict[str, Tensor]
    n_classes: int
    what: str


def start_from(model: TimeSformer | CompactRecurrentViT, path: str) -> str:
    """Load trained weights into a fresh model.

    A CR-ViT can start from a TimeSformer (`load_timesformer`) or a CR-ViT; a TimeSformer only from a TimeSformer. If
    the image size or the number of frames differs, the embeddings of places or times are interpolated (nearest). If the
    number of classes differs, the classifier stays fresh. A PI-ViT counts as a TimeSformer: the modules that it has for
    training are not read, and stay fresh.

    Args:
        model: changed in place.
        path: the folder of a run (its best checkpoint), a checkpoint of a run, weights of the original
            TimeSformer code (.pyth), or a Hugging Face folder or file.

    Returns:
        a line that says what was done.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: it has no weights of such a model, or weights of other sizes.
    """
    place = Path(path).expanduser()
    source = _of_checkpoint(model, place) if is_checkpoint(place) else _published(model, place)
    own_head = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in _HEAD}
    fresh_head = source.n_classes != model.config.n_classes
    weights = {name: tensor for name, tensor in source.weights.items() if not name.startswith(INDUCTION)}
    weights |= {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith(INDUCTION)}
    has_memory = any(name.startswith("memory.") for name in weights)
    if has_memory and isinstance(model, TimeSformer):
        raise ValueError(sentence(source.what, "a CR-ViT", "a TimeSformer, for a TimeSformer to start from"))
    if isinstance(model, CompactRecurrentViT) and not has_memory:
        if fresh_head:
            weights |= {name: tensor[..., : model.config.d_model] for name, tensor in own_head.items()}
        load_timesformer(model, weights)
    else:
        load_weights(model, weights | own_head if fresh_head else weights, place)
    if not fresh_head:
        return f"starts from {source.what}"
    model.load_state_dict(own_head, strict=False)
    return f"starts from {source.what}, with a fresh classifier: {source.n_classes} classes there"


def _of_checkpoint(model: TimeSformer | CompactRecurrentViT, place: Path) -> _Source:
    file, saved = load_best_checkpoint(place)
    weights = scored_weights(saved)
    if "embedding.positions" not in weights:
        came = f"a checkpoint of a {saved['config'].get('experiment')} run"
        raise ValueError(sentence(str(file), came, "one of a video model"))
    n_heads = saved["config"]["model"]["n_heads"]
    if n_heads != model.config.n_heads:
        came, expected = f"a model with model.n_heads {n_heads}", f"one with model.n_heads {model.config.n_heads}"
        raise ValueError(sentence(str(file), came, expected))
    n_classes = len(weights["head.weight"])
    return _Source(_resized(weights, model.config), n_classes, f"{file}, step {saved['position']['step']}")


def _published(model: TimeSformer | CompactRecurrentViT, place: Path) -> _Source:
    file = _weights_file(place)
    weights = read_weights(file)
    known = {field.name for field in fields(TimeSformerConfig)}
    options = {name: value for name, value in vars(model.config).items() if name in known}
    hugging_face = any(name.startswith("timesformer.") for name in weights)
    convert = timesformer_from_huggingface if hugging_face else timesformer_from_original
    converted = convert(weights, **{"attention": "divided", **options})
    head = next(tensor for name, tensor in weights.items() if name.endswith(("head.weight", "classifier.weight")))
    return _Source(converted.state_dict(), len(head), str(file))


def _weights_file(place: Path) -> Path:
    if place.is_file():
        return place
    if not place.exists():
        raise FileNotFoundError(sentence("init_from", f"{place}, which does not exist", "a file or folder"))
    for name in _HUGGING_FACE_FILES:
        if (place / name).is_file():
            return place / name
    expected = f"the folder of a run, or a Hugging Face folder with {' or '.join(_HUGGING_FACE_FILES)}"
    raise ValueError(sentence("init_from", f"{place}, a folder without weights", expected))


def _resized(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Interpolate the embeddings of places and times to the sizes of the model, as `recurra.convert` does."""
    resized = dict(weights)
    positions, edge = weights["embedding.positions"], config.image_size // config.patch_size
    grid = positions[1:].T.unflatten(1, (round((len(positions) - 1) ** 0.5), -1))
    grid = functional.interpolate(grid[None], size=(edge, edge), mode="nearest")[0]
    resized["embedding.positions"] = torch.cat([positions[:1], grid.flatten(1).T])
    if (times := weights.get("encoder.times")) is not None:
        resized["encoder.times"] = functional.interpolate(times.T[None], size=config.n_frames, mode="nearest")[0].T
    return resized
