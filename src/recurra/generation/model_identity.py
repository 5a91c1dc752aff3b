"""What tells one model from another, and one training of a model from the next."""

import hashlib
import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recurra.models import list_models

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
        """Say how `other` differs; None if it is the same model.

        A field that one of them lacks, as files from before there was such a field do, counts as its default.
        """
        if self.kind != other.kind:
            return f"{self.kind} against {other.kind}"
        defaults = _defaults(self.kind)
        one, two = {**defaults, **(self.config or {})}, {**defaults, **(other.config or {})}
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


def _defaults(kind: str) -> dict[str, Any]:
    """The defaults in the config of a registered model, as plain data; empty for other models."""
    config = next((entry.config for entry in list_models() if entry.model.__name__ == kind), None)
    if config is None:
        return {}
    values = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    values |= {field.name: field.default_factory() for field in fields(config) if field.default_factory is not MISSING}
    return _as_json_has_it(values)


def _as_json_has_it(values: dict[str, Any]) -> dict[str, Any]:
    """Through JSON and back, so that what a file gives equals what was written."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=repr))
    return plain


def _plain(config: Any) -> dict[str, Any] | None:
    if not is_dataclass(config) or isinstance(config, type):
        return None
    return _as_json_has_it(asdict(config))
