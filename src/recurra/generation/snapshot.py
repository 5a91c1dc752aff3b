"""A stream at one moment: kept in memory, or in a file."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor, nn

from recurra.data.files import replacing
from recurra.generation.model_identity import ModelIdentity
from recurra.generation.sampling import RECENT_TOKENS
from recurra.generation.standing import Standing
from recurra.packed_state import pack_state, unpack_state
from recurra.state import n_bytes

FORMAT = "recurra-stream"
FORMAT_VERSION = 1

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_METADATA = "recurra"  # one entry for all: the library keeps several in no fixed order


class Snapshot(NamedTuple):
    """A stream at one moment. What the stream does later does not change it.

    at: where the stream stood.
    model: whose stream it was.
    """

    at: Standing
    model: ModelIdentity

    @property
    def n_bytes(self) -> int:
        """Bytes of state, logits, recent tokens and position: for a recurrence the same all along its stream."""
        return n_bytes((self.at.state, self.at.logits)) + (RECENT_TOKENS + 1) * 8


def require_same_model(found: ModelIdentity, model: ModelIdentity, what: str) -> None:
    """Raise a ValueError that says in what the models differ, unless `found`, of `what`, is `model`."""
    if difference := found.difference(model):
        raise ValueError(f"{what} is of another model: {difference}; a state goes on only in the model that made it")


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a safetensors file; it is there whole or not at all. Raises OSError.

    It holds the tensors `position`, `recent` (the last tokens; -1 where the stream has fewer), `logits` and `state.0`,
    `state.1` and so on, depth first, and as metadata, in JSON, the format, the model, the structure of the state and a
    digest. Numbers are written at a fixed width: how long the stream is does not show in the size of the file.
    """
    at = snapshot.at
    recent = [-1] * (RECENT_TOKENS - len(at.recent)) + list(at.recent)
    tensors = {"position": torch.tensor(at.position), "recent": torch.tensor(recent)}
    if at.logits is not None:
        tensors["logits"] = at.logits
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": snapshot.model._asdict(),
        "structure": _take_down(pack_state(at.state), tensors),
    }
    # Clones: tensors of a state may share memory, which the format refuses.
    tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    content["digest"] = _digest(content, tensors)
    with replacing(path) as file:
        file.write(safetensors.save(tensors, metadata={_METADATA: json.dumps(content)}))


def read_snapshot(path: Path, model: nn.Module, identity: ModelIdentity) -> Snapshot:
    """Read what `write_snapshot` wrote, for `model`, whose identity is given.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is foreign or damaged, of another model, or its state has another structure than the model's.
    """
    data = path.read_bytes()
    try:
        tensors = safetensors.load(data)
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no file of a stream at all ({error})") from error
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by Stream.save")
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has the format {content.get('format_version')}; this version of recurra reads {FORMAT_VERSION}"
        )
    if content.pop("digest", None) != _digest(content, tensors):
        raise ValueError(f"{path} is damaged: its content does not match its digest")
    found = ModelIdentity(**content["model"])
    require_same_model(found, identity, str(path))
    state = unpack_state(_put_back(content["structure"], tensors), model)
    logits = tensors["logits"].to(next(model.parameters()).device) if "logits" in tensors else None
    recent = tuple(token for token in tensors["recent"].tolist() if token >= 0)
    return Snapshot(Standing(state, logits, recent, int(tensors["position"])), found)


def _take_down(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """The structure of a packed state as JSON, its leaves being names in `tensors`, to which they are added."""
    if isinstance(packed, list):
        return [_take_down(item, tensors) for item in packed]
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


def _put_back(structure: Any, tensors: dict[str, Tensor]) -> Any:
    """The packed state that `_take_down` took down."""
    if isinstance(structure, list):
        return [_put_back(item, tensors) for item in structure]
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
