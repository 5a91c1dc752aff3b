"""A stream at one moment, kept in memory or in a file."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.files.writing import replacing
from recurra.generation.model_identity import ModelIdentity
from recurra.generation.sampling import RECENT_TOKENS
from recurra.generation.stream_state import StreamState
from recurra.saved_state import state_from_plain, state_to_plain
from recurra.state import n_bytes

FORMAT = "recurra-stream"
FORMAT_VERSION = 1

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_METADATA = "recurra"  # a single entry: safetensors keeps several in no fixed order


class Snapshot(NamedTuple):
    """A stream at one moment. What the stream does later does not change it.

    stream: everything that its next step depends on.
    model: the model that it runs through.
    """

    stream: StreamState
    model: ModelIdentity

    @property
    def n_bytes(self) -> int:
        """Bytes of state, logits, recent tokens and position; for a recurrence constant along the stream."""
        return n_bytes((self.stream.model_state, self.stream.logits)) + (RECENT_TOKENS + 1) * 8


def require_same_model(found: ModelIdentity, model: ModelIdentity, what: str) -> None:
    """Refuse `what`, made by the model `found`, for another `model`.

    Raises:
        ValueError: the models differ; the message says in what.
    """
    if difference := found.difference(model):
        raise ValueError(sentence(what, f"of another model ({difference})", "one of the model that continues it"))


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a safetensors file, whole or not at all. Raises OSError.

    It holds the tensors `position`, `recent` (the last tokens, preceded by -1 where the stream has fewer), `logits` and
    `state.0`, `state.1` and so on, depth first. Its metadata hold, as JSON, the format, the model, the structure of the
    state and a digest. Numbers have a fixed width, so the size of the file does not depend on the stream's length.
    """
    stream = snapshot.stream
    recent = [-1] * (RECENT_TOKENS - len(stream.recent)) + list(stream.recent)
    tensors = {"position": torch.tensor(stream.position), "recent": torch.tensor(recent)}
    if stream.logits is not None:
        tensors["logits"] = stream.logits
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": snapshot.model._asdict(),
        "structure": _outline(state_to_plain(stream.model_state), tensors),
    }
    # Clones: tensors of a state can share memory, which the format refuses.
    tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    content["digest"] = _digest(content, tensors)
    with replacing(path) as file:
        file.write(safetensors.save(tensors, metadata={_METADATA: json.dumps(content)}))


def read_snapshot(path: Path, model: nn.Module, identity: ModelIdentity) -> Snapshot:
    """Read for `model`, of the given identity, what `write_snapshot` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is foreign, damaged or of another model, or its state does not have the structure of the model's.
    """
    data = path.read_bytes()
    saved = "a stream that Stream.save wrote"
    try:
        tensors = safetensors.load(data)
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(sentence(str(path), f"damaged or no safetensors file ({error})", saved)) from error
    if content.get("format") != FORMAT:
        raise ValueError(sentence(str(path), "another kind of safetensors file", saved))
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise ValueError(sentence(str(path), f"a stream in format {version}", f"format {FORMAT_VERSION}"))
    if content.pop("digest", None) != _digest(content, tensors):
        raise ValueError(sentence(str(path), "damaged: its content does not match its digest", saved))
    found = ModelIdentity(**content["model"])
    require_same_model(found, identity, str(path))
    state = state_from_plain(_fill(content["structure"], tensors), model)
    logits = tensors["logits"].to(next(model.parameters()).device) if "logits" in tensors else None
    recent = tuple(token for token in tensors["recent"].tolist() if token >= 0)
    return Snapshot(StreamState(state, logits, recent, int(tensors["position"])), found)


def _outline(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Give a packed state's structure as JSON: each leaf becomes a name in `tensors`, where its value is put."""
    if isinstance(packed, list):
        return [_outline(item, tensors) for item in packed]
    if packed is None:
        return None
    name = f"state.{sum(key.startswith('state.') for key in tensors)}"
    if not isinstance(packed, Tensor):
        tensors[name] = torch.tensor(packed, dtype=_NUMBERS[type(packed)])
        return {"number": name}
    if packed.is_complex():  # the format has no complex128
        tensors[name] = torch.view_as_real(packed.resolve_conj())
        return {"complex": name}
    tensors[name] = packed
    return {"tensor": name}


def _fill(structure: Any, tensors: dict[str, Tensor]) -> Any:
    """Give back the packed state whose structure and tensors `_outline` gave."""
    if isinstance(structure, list):
        return [_fill(item, tensors) for item in structure]
    if structure is None:
        return None
    ((kind, name),) = structure.items()
    if kind == "number":
        return tensors[name].item()
    return torch.view_as_complex(tensors[name]) if kind == "complex" else tensors[name]


def _digest(content: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
