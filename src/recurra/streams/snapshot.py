"""A stream at one moment, kept in memory or in a file."""

import hashlib
import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra._choices import RECENT_TOKENS
from recurra._files.digests import content_digest
from recurra._files.reading import parse_json
from recurra._files.weights import read_safetensors, write_safetensors
from recurra._files.writing import replacing
from recurra.checks import sentence
from recurra.state import n_bytes, state_from_tensors, state_to_tensors

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelIdentity(NamedTuple):
    """The model's identity, recorded in a saved state.

    kind: the name of its class.
    config: its `config`, a dataclass, as plain data; None if it has none.
    weights: `weights_fingerprint`.
    """

    kind: str
    config: dict[str, Any] | None
    weights: str

    @classmethod
    def of(cls, model: nn.Module) -> "ModelIdentity":
        """Return a model's identity; this reads every weight once."""
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

    The bits are summed as integers, which is fast, exact and the same on every device. A training step or rounding to
    another type changes the sums; swapping weights within a tensor does not.
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
    # through JSON and back, so that what a file has equals what was written
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=repr))
    return plain


class StreamState(NamedTuple):
    """Everything that a stream's next step depends on; the default is the start of a stream.

    model_state: the model's state, of batch 1.
    logits: after the last token; None at the start.
    recent: the last tokens, oldest first, at most `RECENT_TOKENS`.
    position: number of tokens read.
    """

    model_state: Any = None
    logits: Float[Tensor, " V"] | None = None
    recent: tuple[int, ...] = ()
    position: int = 0

    def after(self, tokens: Int[Tensor, " L"], logits: Float[Tensor, " V"], model_state: Any) -> "StreamState":
        """Return the stream after reading `tokens`, at least one, which led to `logits` and `model_state`."""
        recent = (*self.recent, *tokens[-RECENT_TOKENS:].tolist())[-RECENT_TOKENS:]
        return StreamState(model_state, logits, recent, self.position + len(tokens))


_FORMAT = "recurra-stream"
_FORMAT_VERSION = 1

_SAVED = "a stream that Stream.save wrote"
_STATE = "state."
_METADATA = "recurra"  # a single entry: safetensors keeps several in no fixed order


class Snapshot(NamedTuple):
    """A stream at one moment. Later calls of the stream do not change it.

    stream: everything that its next step depends on.
    model: its model.
    """

    stream: StreamState
    model: ModelIdentity

    @property
    def n_bytes(self) -> int:
        """Bytes of state, logits, recent tokens and position; constant along the stream for a recurrence."""
        return n_bytes((self.stream.model_state, self.stream.logits)) + (RECENT_TOKENS + 1) * 8


def require_same_model(found: ModelIdentity, model: ModelIdentity, what: str) -> None:
    """Refuse `what`, made by the model `found`, for another `model`."""
    if difference := found.difference(model):
        raise ValueError(sentence(what, f"of another model ({difference})", "one of the model that continues it"))


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a safetensors file, completely or not at all. Raises OSError.

    It contains the tensors `position`, `recent` (the last tokens, padded with -1 in front), `logits` and those of the
    state, with names such as `state.layers.0.conv`. Its metadata contain, as JSON, the format, the model and a digest.
    Numbers have a fixed width, so the size of the file does not depend on the stream's length.
    """
    stream = snapshot.stream
    recent = [-1] * (RECENT_TOKENS - len(stream.recent)) + list(stream.recent)
    tensors = {
        "position": torch.tensor(stream.position, device="cpu"),
        "recent": torch.tensor(recent, device="cpu"),
        **{_STATE + place: tensor for place, tensor in state_to_tensors(stream.model_state).items()},
    }
    if stream.logits is not None:
        tensors["logits"] = stream.logits
    content = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "model": snapshot.model._asdict(),
    }
    content["digest"] = content_digest(content, tensors)
    with replacing(path) as file:
        write_safetensors(file, tensors, {_METADATA: json.dumps(content)})


def read_snapshot(path: Path, model: nn.Module, identity: ModelIdentity) -> Snapshot:
    """Read a file of `write_snapshot` for `model` with the given identity; once the digest matches, it is trusted."""
    tensors, metadata = read_safetensors(path, _SAVED)
    content = parse_json(metadata.get(_METADATA, "{}"), f"the metadata of {path}")
    if content.get("format") != _FORMAT:
        raise ValueError(sentence(str(path), "another kind of safetensors file", _SAVED))
    if (version := content.get("format_version")) != _FORMAT_VERSION:
        raise ValueError(sentence(str(path), f"a stream in format {version}", f"format {_FORMAT_VERSION}"))
    if content.pop("digest", None) != content_digest(content, tensors):
        raise ValueError(sentence(str(path), "damaged: its content does not match its digest", _SAVED))
    found = ModelIdentity(**content["model"])
    require_same_model(found, identity, str(path))
    of_state = {name.removeprefix(_STATE): x for name, x in tensors.items() if name.startswith(_STATE)}
    try:
        state = state_from_tensors(of_state, model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    logits = tensors.get("logits")
    if logits is not None:
        logits = logits.to(next(model.parameters()).device)
    recent = tuple(token for token in tensors["recent"].tolist() if token >= 0)
    return Snapshot(StreamState(state, logits, recent, int(tensors["position"])), found)
