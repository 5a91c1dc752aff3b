"""What tells one model from another, and one training of a model from the next."""

import hashlib
import json
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelIdentity(NamedTuple):
    """What a saved state records about its model.

    kind: the name of its class.
    config: its `config`, a dataclass, as plain data; None if it has none.
    weights: `weights_fingerprint`.
    """

    kind: str
    config: dict[str, Any] | None
    weights: str

    @classmethod
    def of(cls, model: nn.Module) -> "ModelIdentity":
        """Give a model's identity; this reads every weight once."""
        return cls(type(model).__name__, _plain(getattr(model, "config", None)), weights_fingerprint(model))

    def difference(self, other: "ModelIdentity") -> str | None:
        """Say how `other` differs; None if it is the same model."""
        if self.kind != other.kind:
            return f"{self.kind} against {other.kind}"
        one, two = self.config or {}, other.config or {}
        keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
        if keys:
            return ", ".join(f"{key} {one.get(key)!r} against {two.get(key)!r}" for key in keys)
        if self.weights != other.weights:
            return f"a {self.kind} like it with other weights"
        return None


def weights_fingerprint(model: nn.Module) -> str:
    """Digest the names, types and shapes of all weights and buffers, and the sum of each one's bits.

    The bits are summed as integers, which is quick, exact and the same on every device. A training step changes the
    sums, and so does rounding to another type; swapping weights within one tensor does not.
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
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    return int(tensor.sum(dtype=torch.int64))


def _plain(config: Any) -> dict[str, Any] | None:
    if not is_dataclass(config) or isinstance(config, type):
        return None
    # Through JSON and back, so that what a file gives equals what was written.
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=repr))
    return plain
