"""TimeSformer weights as published: of the original code, and of Hugging Face's port of it.

The original is github.com/facebookresearch/TimeSformer (timesformer/models/vit.py), Hugging Face's is
`TimesformerForVideoClassification` of transformers 5. They compute the same with divided and with joint attention; with
attention over space alone the port gives logits for every frame, where the original, as here, takes the mean over the
frames before the last norm.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from recurra.checks import choose, require, sentence
from recurra.convert.portable import NO_CROSS_ATTENTION, Neutral, read_weights, renamed, take_neutral, weights_of
from recurra.convert.published._settings import OF_NO_CONCERN
from recurra.train.checkpoint import load_weights, scored_weights
from recurra.train.run_folder import is_checkpoint, load_best_checkpoint
from recurra.video._space_time import NORM_EPS
from recurra.video.crvit import CompactRecurrentViT, load_timesformer
from recurra.video.pi_vit import INDUCTION
from recurra.video.timesformer import TimeSformer, TimeSformerConfig

_CHANNELS_OF_A_HEAD = 64
"""In all published vision Transformers; the weights do not tell."""
_RENAMED = {
    "num_channels": "n_channels",
    "num_frames": "n_frames",
    "num_labels": "n_classes",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_channel_mixing",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "attention_type": "attention",
    "drop_path_rate": "drop_path",
}
"""The options of Hugging Face's TimesformerConfig to those here."""
_NEUTRAL = {
    **NO_CROSS_ATTENTION,
    "hidden_act": Neutral(lambda value: value == "gelu", "'gelu'", "other activations are not supported"),
    "layer_norm_eps": Neutral(lambda value: value == NORM_EPS, repr(NORM_EPS), "other norms are not supported"),
    "qkv_bias": Neutral(lambda value: value is True, "True", "attention without biases is not supported"),
}


def _edge(size: Any) -> Any:
    if isinstance(size, (list, tuple)):
        require(len(size) == 2 and size[0] == size[1], "image_size or patch_size", size, "two equal edges")
        return size[0]
    return size


_TRANSLATED: dict[str, Callable[[Any], Any]] = {
    "image_size": _edge,
    "patch_size": _edge,
    "hidden_dropout_prob": float,
    "attention_probs_dropout_prob": float,
    "drop_path_rate": float,
    "attention_type": lambda value: choose(
        "attention_type", {"divided_space_time": "divided", "joint_space_time": "joint", "space_only": "space"}, value
    ),
}
_HEAD = ("head.weight", "head.bias")


_PARTS = (
    *("embedding.class_token", "embedding.positions", "embedding.patches.projection", "encoder.times"),
    *("norm", "head"),
)
"""Names outside of the blocks."""
_IN_BLOCK = (
    *("norm_time", "time_attention.queries_keys_values", "time_attention.output_projection", "time_projection"),
    *("norm_attention", "attention.queries_keys_values", "attention.output_projection"),
    *("norm_feed_forward", "feed_forward.0", "feed_forward.3"),
)
"""Names in a block; a block has the first four with divided attention only."""


class _Names(NamedTuple):
    """How a code base names `_PARTS`, what stands before a block's number, and `_IN_BLOCK`."""

    parts: tuple[str, ...]
    blocks: str
    in_block: tuple[str, ...]

    def theirs(self, own: str) -> str:
        """Return their name of a parameter here."""
        if match := re.fullmatch(r"encoder\.blocks\.(\d+)\.(.+)\.(\w+)", own):
            return f"{self.blocks}.{match[1]}.{self.in_block[_IN_BLOCK.index(match[2])]}.{match[3]}"
        if own in _PARTS:
            return self.parts[_PARTS.index(own)]
        module, kind = own.rsplit(".", 1)
        return f"{self.parts[_PARTS.index(module)]}.{kind}"


_ORIGINAL = _Names(
    parts=("cls_token", "pos_embed", "patch_embed.proj", "time_embed", "norm", "head"),
    blocks="blocks",
    in_block=(
        *("temporal_norm1", "temporal_attn.qkv", "temporal_attn.proj", "temporal_fc"),
        *("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"),
    ),
)
_EMBEDDINGS = "timesformer.embeddings"
_HUGGING_FACE = _Names(
    parts=(
        *(f"{_EMBEDDINGS}.cls_token", f"{_EMBEDDINGS}.position_embeddings"),
        *(f"{_EMBEDDINGS}.patch_embeddings.projection", f"{_EMBEDDINGS}.time_embeddings"),
        *("timesformer.layernorm", "classifier"),
    ),
    blocks="timesformer.encoder.layer",
    in_block=(
        *("temporal_layernorm", "temporal_attention.attention.qkv", "temporal_attention.output.dense"),
        *("temporal_dense", "layernorm_before", "attention.attention.qkv", "attention.output.dense"),
        *("layernorm_after", "intermediate.dense", "output.dense"),
    ),
)


def _timesformer_from_original(state_dict: Mapping[str, Any], **config: Any) -> TimeSformer:
    """Make a `TimeSformer` from weights of the original code, in their type and in evaluation mode."""
    weights = weights_of(state_dict)
    plain = {name.removeprefix("module.").removeprefix("model."): tensor for name, tensor in weights.items()}
    if len(plain) < len(weights):
        raise ValueError("state_dict has the same names with and without model. in front; give one set of weights")
    return _convert(plain, _ORIGINAL, config)


def _timesformer_from_huggingface(state_dict: Mapping[str, Any], **config: Any) -> TimeSformer:
    """Make a `TimeSformer` from weights of Hugging Face's `TimesformerForVideoClassification`: it gives its logits."""
    return _convert(weights_of(state_dict), _HUGGING_FACE, config)


def _convert(weights: Mapping[str, Tensor], names: _Names, options: dict[str, Any]) -> TimeSformer:
    options = _own_options(options)
    fixed = _fixed_sizes(weights, names)
    for name in fixed.keys() & options.keys():
        if options[name] != fixed[name]:
            raise ValueError(f"{name} is given as {options[name]}; in the weights it is {fixed[name]}")
    of_data = _data_sizes(weights, names, fixed["patch_size"])
    if fixed["attention"] != "space":
        of_data["n_frames"] = _shape(weights, names, "encoder.times")[-2]
    elif "n_frames" not in options:
        hint = "with attention over space alone the weights do not tell"
        raise ValueError(sentence("n_frames", "missing", "the frames of a segment (num_frames)", hint))
    if "n_heads" not in options:
        fixed["n_heads"] = _n_heads(fixed["d_model"])
    model = TimeSformer(TimeSformerConfig(**{**of_data, **fixed, **options}))
    model.to(weights[names.theirs("embedding.patches.projection.weight")].dtype)
    _copy(weights, names, model, keep_head=model.config.n_classes != of_data["n_classes"])
    return model.eval()


def _own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names of `TimeSformerConfig`."""
    left = {name: value for name, value in given.items() if name not in OF_NO_CONCERN | {"tie_word_embeddings"}}
    take_neutral(left, _NEUTRAL)
    return renamed(left, (field.name for field in fields(TimeSformerConfig)), _RENAMED, _TRANSLATED)


def _shape(weights: Mapping[str, Tensor], names: _Names, own: str) -> torch.Size:
    if names.theirs(own) not in weights:
        raise ValueError(f"state_dict is no TimeSformer, or not a whole one; missing: {names.theirs(own)}")
    return weights[names.theirs(own)].shape


def _fixed_sizes(weights: Mapping[str, Tensor], names: _Names) -> dict[str, Any]:
    """What the weights tell of the configuration and no option may change."""
    projection = _shape(weights, names, "embedding.patches.projection.weight")
    if len(projection) != 4 or projection[2] != projection[3]:
        name = names.theirs("embedding.patches.projection.weight")
        raise ValueError(f"{name} is of shape {tuple(projection)}; expected (channels, colours, edge, edge)")
    numbers = (re.match(rf"{re.escape(names.blocks)}\.(\d+)\.", name) for name in weights)
    of_time = tuple(f".{name}." for name in names.in_block[:4])
    if any(part in name for name in weights for part in of_time):
        attention = "divided"
    else:
        attention = "joint" if names.theirs("encoder.times") in weights else "space"
    return {
        "d_model": projection[0],
        "n_channels": projection[1],
        "patch_size": projection[2],
        "n_layer": 1 + max((int(match[1]) for match in numbers if match), default=0),
        "d_channel_mixing": _shape(weights, names, "encoder.blocks.0.feed_forward.0.weight")[0],
        "attention": attention,
    }


def _data_sizes(weights: Mapping[str, Tensor], names: _Names, patch_size: int) -> dict[str, int]:
    """What the weights tell of the data that they were trained on."""
    n_patches = _shape(weights, names, "embedding.positions")[-2] - 1
    edge = round(n_patches**0.5)
    if edge**2 != n_patches:
        raise ValueError(
            f"{names.theirs('embedding.positions')} has {n_patches} patches; expected those of a square frame"
        )
    return {"image_size": edge * patch_size, "n_classes": _shape(weights, names, "head.weight")[0]}


def _n_heads(d_model: int) -> int:
    if d_model % _CHANNELS_OF_A_HEAD:
        raise ValueError(
            f"the weights do not tell n_heads, and with d_model = {d_model} a head cannot have the usual "
            f"{_CHANNELS_OF_A_HEAD} channels; give n_heads"
        )
    return d_model // _CHANNELS_OF_A_HEAD


def _copy(weights: Mapping[str, Tensor], names: _Names, model: TimeSformer, *, keep_head: bool) -> None:
    """Fill the model, all but its head where that is kept, and refuse weights that are not exactly its own."""
    parameters, config = dict(model.named_parameters()), model.config
    theirs = {own: names.theirs(own) for own in parameters}
    missing = [name for name in theirs.values() if name not in weights]
    unknown = sorted(weights.keys() - set(theirs.values()))
    if missing or unknown:
        parts = (f"{what}: {', '.join(found)}" for what, found in (("missing", missing), ("unknown", unknown)) if found)
        raise ValueError(
            f"state_dict does not fit this TimeSformer (attention {config.attention}, n_layer {config.n_layer}); "
            f"{'; '.join(parts)}"
        )
    own_weights = {own: weights[name] for own, name in theirs.items()}
    for own, part in own_weights.items():
        if part.dim() == 3:  # an embedding, with a leading axis of 1; the class token's has two
            own_weights[own] = part[0, 0] if own == "embedding.class_token" else part[0]
    for own, values in _resized(own_weights, config).items():
        if keep_head and own in _HEAD:
            continue
        if values.shape != parameters[own].shape:
            raise ValueError(
                f"{theirs[own]} does not fit: {tuple(values.shape)} of its numbers where the model has "
                f"{tuple(parameters[own].shape)}"
            )
        with torch.no_grad():
            parameters[own].copy_(values)


def _resized(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Interpolate the embeddings of places and times to the sizes of the model (nearest)."""
    resized = dict(weights)
    positions, edge = weights["embedding.positions"], config.image_size // config.patch_size
    grid = positions[1:].T.unflatten(1, (round((len(positions) - 1) ** 0.5), -1))
    grid = functional.interpolate(grid[None], size=(edge, edge), mode="nearest")[0]
    resized["embedding.positions"] = torch.cat([positions[:1], grid.flatten(1).T])
    if (times := weights.get("encoder.times")) is not None:
        resized["encoder.times"] = functional.interpolate(times.T[None], size=config.n_frames, mode="nearest")[0].T
    return resized


# --- the weights that a video model starts from: a run's, the published TimeSformer's, or Hugging Face's port of it ---


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
        path: the folder or a checkpoint of a run, weights of the original code (.pyth), or Hugging Face's.

    Returns:
        a line that says what was done.
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
        got = f"a checkpoint of a {saved['config'].get('experiment')} run"
        raise ValueError(sentence(str(file), got, "one of a video model"))
    n_heads = saved["config"]["model"]["n_heads"]
    if n_heads != model.config.n_heads:
        got, expected = f"a model with model.n_heads {n_heads}", f"one with model.n_heads {model.config.n_heads}"
        raise ValueError(sentence(str(file), got, expected))
    n_classes = len(weights["head.weight"])
    return _Source(_resized(weights, model.config), n_classes, f"{file}, step {saved['position']['step']}")


def _published(model: TimeSformer | CompactRecurrentViT, place: Path) -> _Source:
    file = _weights_file(place)
    weights = read_weights(file)
    known = {field.name for field in fields(TimeSformerConfig)}
    options = {name: value for name, value in vars(model.config).items() if name in known}
    hugging_face = any(name.startswith("timesformer.") for name in weights)
    convert = _timesformer_from_huggingface if hugging_face else _timesformer_from_original
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
