"""A compact recurrent vision Transformer that starts from a trained TimeSformer (CRT section 5.3)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from recurra.models.compact_recurrent_vit import CompactRecurrentViT

_HEAD = "head.weight"
_OWN = "memory."


def load_timesformer(model: CompactRecurrentViT, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of a trained `TimeSformer` with divided attention into a CR-ViT of the same sizes.

    Every weight that both have is copied. The classifier reads twice as many channels; half of TimeSformer's goes to
    either half, so that the logits of a stream's first segment are TimeSformer's. The memory RNN keeps its weights.

    Args:
        model: the CR-ViT, changed in place.
        state_dict: the TimeSformer's, `timesformer.state_dict()`.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape; the message names it, and the model is unchanged.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_OWN)}
    missing = [name for name in own if name not in state_dict]
    unknown = [name for name in state_dict if name not in own]
    if missing or unknown:
        parts = (f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names)
        raise ValueError(
            f"state_dict is not that of a TimeSformer with divided attention and {model.config.n_layer} blocks; "
            f"{'; '.join(parts)}"
        )
    values = {name: _widened(tensor) if name == _HEAD else tensor for name, tensor in state_dict.items()}
    for name, tensor in own.items():
        if values[name].shape != tensor.shape:
            raise ValueError(
                f"{name} does not fit: {tuple(values[name].shape)} of its numbers where the model has "
                f"{tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(values[name])


def _widened(weight: Tensor) -> Tensor:
    return torch.cat([weight, weight], 1) / 2
