"""Whose state is it: what tells one model from another, and one training of it from the next."""

import hashlib
import json
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelIdentity(NamedTuple):
    """A model as its states know it.

    kind: the name of its class.
    config: its `config`, a dataclass, as plain data; None where it has none.
    weights: `weights_fingerprint`.
    """

    kind: str
    config: dict[str, Any] | None
    weights: str

    @classmethod
    def of(cls, model: nn.Module) -> "ModelIdentity":
        """Take down a model's identity; it reads every weight once."""
        return cls(type(model).__name__, _plain(getattr(model, "config", None)), weights_fingerprint(model))

    def difference(self, other: "ModelIdentity") -> str | None:
        """Say in what `other` is another model; None where it is the same."""
        if self.kind != other.kind:
            return f"{self.kind} against {other.kind}"
        one, two = self.config or {}, other.config or {}
        keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
        if keys:
            return ", ".join(f"{key} {one.get(key)!r} against {two.get(key)!r}" for key in keys)
        if self.weights != other.weights:
            return f"a {self.kind} like it, but with other weights"
        return None


def weights_fingerprint(model: nn.Module) -> str:
    """A digest of the names, types and shapes of all weights and buffers, and of the sum of each one's bits.

    The bits are summed as whole numbers, which is quick, exact and the same on every device. A training step changes
    the sums, as does rounding to another type; weights that merely change places inside of one tensor do not.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum_of_bits(tensor)}\n".encode())
    return digest.hexdigest()


def _sum_of_bits(tensor: Tensor) -> int:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.view(_WHOLE_NUMBERS[tensor.element_size()])
    return int(tensor.sum(dtype=torch.int64))


def _plain(config: Any) -> dict[str, Any] | None:
    if not is_dataclass(config) or isinstance(config, type):
        return None
    # Through JSON and back, so that what is read from a file equals what was written.
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=repr))
    return plain
