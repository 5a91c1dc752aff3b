"""Start a compact recurrent vision Transformer from a trained TimeSformer (CRT section 5.3)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from recurra.checks import sentence
from recurra.models.compact_recurrent_vit import CompactRecurrentViT

_HEAD = "head.weight"
_OWN = "memory."


def load_timesformer(model: CompactRecurrentViT, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of a trained `TimeSformer` with divided attention into a CR-ViT of the same sizes.

    All weights that both models have are copied. CR-ViT's classifier reads twice as many channels: each half gets half
    of TimeSformer's weights, so that the logits of a stream's first segment are TimeSformer's. The memory RNN keeps its
    weights.

    Args:
        model: the CR-ViT, changed in place.
        state_dict: the weights of the TimeSformer, `timesformer.state_dict()`.

    Raises:
        ValueError: a weight is missing, unknown, or has another shape; the message names it, and the model is
            unchanged.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_OWN)}
    missing = [name for name in own if name not in state_dict]
    unknown = [name for name in state_dict if name not in own]
    if missing or unknown:
        parts = [f"{how} {', '.join(names)}" for how, names in (("without", missing), ("with", unknown)) if names]
        expected = f"the weights of a TimeSformer with divided attention and {model.config.n_layer} blocks"
        raise ValueError(sentence("state_dict", f"a mapping {' and '.join(parts)}", expected))
    for name, tensor in own.items():
        shape, expected_shape = tuple(state_dict[name].shape), tuple(tensor.shape)
        if name == _HEAD:
            expected_shape = (expected_shape[0], expected_shape[1] // 2)
        if shape != expected_shape:
            raise ValueError(sentence(f"state_dict[{name!r}]", f"of shape {shape}", f"{expected_shape}"))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_widened(state_dict[name]) if name == _HEAD else state_dict[name])


def _widened(weight: Tensor) -> Tensor:
    return torch.cat([weight, weight], 1) / 2
