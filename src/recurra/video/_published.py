"""The weights that a video model starts from: a run's, the published TimeSformer's, or Hugging Face's port of it.

The published code is github.com/facebookresearch/TimeSformer (timesformer/models/vit.py), Hugging Face's is
`TimesformerForVideoClassification` of transformers 5. Divided attention alone is supported.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recurra.checks import require, sentence
from recurra.convert.portable import read_weights
from recurra.train.checkpoint import load_weights, scored_weights
from recurra.train.run_folder import is_checkpoint, load_best_checkpoint
from recurra.video.crvit import CompactRecurrentViT, load_timesformer
from recurra.video.pi_vit import INDUCTION
from recurra.video.timesformer import TimeSformer

_THEIRS = {
    "embedding.class_token": ("cls_token", "timesformer.embeddings.cls_token"),
    "embedding.positions": ("pos_embed", "timesformer.embeddings.position_embeddings"),
    "embedding.patches.projection": ("patch_embed.proj", "timesformer.embeddings.patch_embeddings.projection"),
    "encoder.times": ("time_embed", "timesformer.embeddings.time_embeddings"),
    "norm": ("norm", "timesformer.layernorm"),
    "head": ("head", "classifier"),
    # in a block
    "norm_time": ("temporal_norm1", "temporal_layernorm"),
    "time_attention.queries_keys_values": ("temporal_attn.qkv", "temporal_attention.attention.qkv"),
    "time_attention.output_projection": ("temporal_attn.proj", "temporal_attention.output.dense"),
    "time_projection": ("temporal_fc", "temporal_dense"),
    "norm_attention": ("norm1", "layernorm_before"),
    "attention.queries_keys_values": ("attn.qkv", "attention.attention.qkv"),
    "attention.output_projection": ("attn.proj", "attention.output.dense"),
    "norm_feed_forward": ("norm2", "layernorm_after"),
    "feed_forward.0": ("mlp.fc1", "intermediate.dense"),
    "feed_forward.3": ("mlp.fc2", "output.dense"),
}
"""Names here to those of the original code and of the port."""
_OWN = {theirs: own for own, names in _THEIRS.items() for theirs in names}
_N_AXES = {"embedding.class_token": 1, "embedding.positions": 2, "encoder.times": 2}
_HEAD = ("head.weight", "head.bias")
_HUGGING_FACE_FILES = ("model.safetensors", "pytorch_model.bin")


def start_from(model: TimeSformer | CompactRecurrentViT, path: str) -> str:
    """Load trained weights into a fresh model.

    A CR-ViT can start from a TimeSformer (`load_timesformer`) or a CR-ViT; a TimeSformer only from a TimeSformer. If
    the image size or the number of frames differs, the embeddings of places or times are interpolated (nearest). If the
    number of classes differs, the classifier stays fresh. A PI-ViT counts as a TimeSformer: the modules that it has for
    training are not read, and stay fresh.

    Args:
        model: changed in place.
        path: the folder or a checkpoint of a run, weights of the original code (.pyth), or Hugging Face's.

    Returns:
        a line that says what was done.
    """
    place = Path(path).expanduser()
    found, source = _of_checkpoint(model, place) if is_checkpoint(place) else _published(place)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith((*INDUCTION, *_HEAD))}
    own_head = {name: tensor for name, tensor in own.items() if name in _HEAD}
    resized = _resized(found, source, model.config)
    weights = {name: tensor for name, tensor in resized.items() if not name.startswith(INDUCTION)}
    weights |= {name: tensor for name, tensor in own.items() if name.startswith(INDUCTION)}
    has_memory = any(name.startswith("memory.") for name in weights)
    if has_memory and isinstance(model, TimeSformer):
        raise ValueError(sentence(source, "a CR-ViT", "a TimeSformer, for a TimeSformer to start from"))
    n_classes = len(weights["head.weight"])
    fresh_head = n_classes != model.config.n_classes
    if isinstance(model, CompactRecurrentViT) and not has_memory:
        if fresh_head:
            weights |= own_head | {"head.weight": own_head["head.weight"][:, : model.config.d_model]}
        load_timesformer(model, weights)
    else:
        load_weights(model, weights | own_head if fresh_head else weights, place)
    if not fresh_head:
        return f"starts from {source}"
    model.load_state_dict(own_head, strict=False)
    return f"starts from {source}, with a fresh classifier: {n_classes} classes there"


def _of_checkpoint(model: TimeSformer | CompactRecurrentViT, place: Path) -> tuple[dict[str, Tensor], str]:
    """Return weights by our names, and the file that they come from, in words."""
    file, saved = load_best_checkpoint(place)
    weights = scored_weights(saved)
    if "embedding.positions" not in weights:
        got = f"a checkpoint of a {saved['config'].get('experiment')} run"
        raise ValueError(sentence(str(file), got, "one of a video model"))
    n_heads = saved["config"]["model"]["n_heads"]
    if n_heads != model.config.n_heads:
        got, expected = f"a model with model.n_heads {n_heads}", f"one with model.n_heads {model.config.n_heads}"
        raise ValueError(sentence(str(file), got, expected))
    return weights, f"{file}, step {saved['position']['step']}"


def _published(place: Path) -> tuple[dict[str, Tensor], str]:
    files = [place] if place.is_file() else [place / name for name in _HUGGING_FACE_FILES if (place / name).is_file()]
    if not place.exists():
        raise FileNotFoundError(sentence("init_from", f"{place}, which does not exist", "a file or folder"))
    if not files:
        expected = f"the folder of a run, or a Hugging Face folder with {' or '.join(_HUGGING_FACE_FILES)}"
        raise ValueError(sentence("init_from", f"{place}, a folder without weights", expected))
    weights = own_weights(read_weights(files[0]))
    if missing := {"embedding.positions", "head.weight"} - weights.keys():
        got = f"without {', '.join(sorted(missing))}"
        raise ValueError(sentence(str(files[0]), got, "the weights of a TimeSformer"))
    return weights, str(files[0])


def own_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return published weights as a `TimeSformer` names and shapes them; what is unknown keeps its name."""
    own = {_own_name(name): tensor for name, tensor in weights.items()}
    for name in own.keys() & _N_AXES.keys():  # where theirs have leading axes of 1
        own[name] = own[name].flatten(0, -_N_AXES[name])
    return own


def _own_name(name: str) -> str:
    plain = name.removeprefix("module.").removeprefix("model.")
    block = re.match(r"(?:blocks|timesformer\.encoder\.layer)\.(\d+)\.", plain)
    prefix, rest = (f"encoder.blocks.{block[1]}.", plain[block.end() :]) if block else ("", plain)
    module, _, kind = rest.rpartition(".")
    if rest in _OWN:
        return _OWN[rest]
    return f"{prefix}{_OWN[module]}.{kind}" if module in _OWN else plain


def _resized(weights: Mapping[str, Tensor], source: str, config: Any) -> dict[str, Tensor]:
    """Interpolate the embeddings of places and times to the sizes of the model (nearest)."""
    resized = dict(weights)
    positions, edge = resized["embedding.positions"], config.image_size // config.patch_size
    rows = round((len(positions) - 1) ** 0.5)
    require(rows**2 == len(positions) - 1, source, f"of {len(positions) - 1} patches", "those of a square frame")
    grid = positions[1:].T.unflatten(1, (rows, rows))
    grid = functional.interpolate(grid[None], size=(edge, edge), mode="nearest")[0]
    resized["embedding.positions"] = torch.cat([positions[:1], grid.flatten(1).T])
    if (times := resized.get("encoder.times")) is not None:
        resized["encoder.times"] = functional.interpolate(times.T[None], size=config.n_frames, mode="nearest")[0].T
    return resized
