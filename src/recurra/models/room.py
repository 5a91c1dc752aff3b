"""Whether there is memory for a model, found before the model is made.

An allocation beyond the machine's memory may succeed, and the process is killed when the weights are drawn. So a model
of large sizes is first outlined: its tensors have shapes and no memory.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recurra.checks import sentence
from recurra.models.outline import outlined

_SMALL = 2**28
"""Layers times the square of the largest size: models below this are made without a look."""
_FEW = 24
"""Layers that are outlined one by one."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")
_N_SHOWN = 3


def make_within_memory(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """Make the model of a configuration, if there is memory for its weights.

    Raises:
        ValueError: there is not; the message says how many bytes they take, and names the largest sizes.
    """
    require_room(make, config)
    with memory_in_words(config):
        return make(config)


def require_room(make: Callable[[Any], nn.Module], config: Any) -> None:
    """Refuse a configuration whose weights need more memory than the machine has. Raises ValueError."""
    sizes = _sizes(config)
    n_layer = max(1, int(getattr(config, "n_layer", 1)))
    if n_layer * max(sizes.values(), default=0) ** 2 <= _SMALL or torch.get_default_device().type != "cpu":
        return
    n_bytes = _n_bytes(make, config, n_layer)
    if n_bytes is None or n_bytes > memory_bytes():
        amount = "more weights than can be counted" if n_bytes is None else f"{n_bytes:,} bytes of weights"
        raise ValueError(sentence("model", f"one of {amount} ({_shown(config)})", _room()))


@contextmanager
def memory_in_words(config: Any) -> Iterator[None]:
    """Turn an allocation that failed into the one sentence: a ValueError with the number of bytes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        asked = _ASKED.search(str(error))
        if asked is None and not isinstance(error, MemoryError):
            raise
        amount = f"{int(asked[1]):,} bytes" if asked else "memory"
        came = f"one for which {amount} could not be allocated ({_shown(config)})"
        raise ValueError(sentence("model", came, _room())) from error


def memory_bytes() -> int:
    """Return the bytes of memory that this machine has, or this process may use if that is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    try:
        limit = _CGROUP.read_text().strip()
    except OSError:
        return available
    return min(available, int(limit)) if limit.isdigit() else available


def _room() -> str:
    return f"one that fits in the {memory_bytes():,} bytes of memory here"


def _n_bytes(make: Callable[[Any], nn.Module], config: Any, n_layer: int) -> int | None:
    """Count the bytes of parameters and buffers; None if there are too many to count.

    Of many layers only one and two are outlined: layers are much alike, and there may be any number of them.
    """
    try:
        if n_layer > _FEW and (few := _with_few_layers(config)):
            one, two = (_bytes_of_outline(make, shorter) for shorter in few)
            return one + (n_layer - 1) * (two - one)
        return _bytes_of_outline(make, config)
    except RuntimeError:  # of PyTorch, for sizes beyond 64 bits
        return None


def _with_few_layers(config: Any) -> list[Any]:
    """The configuration with one and with two layers; empty where its layers differ: they have to be outlined all."""
    if isinstance(getattr(config, "mixer", None), list):  # a list has a name for each layer
        return []
    try:
        return [replace(config, n_layer=n) for n in (1, 2)]
    except ValueError:  # of an option that names a layer
        return []


def _bytes_of_outline(make: Callable[[Any], nn.Module], config: Any) -> int:
    with torch.random.fork_rng(devices=[]), outlined():
        model = make(config)
    return sum(tensor.numel() * tensor.element_size() for tensor in chain(model.parameters(), model.buffers()))


def _sizes(config: Any) -> dict[str, int]:
    """The whole numbers of a configuration by name, those inside options included; the number of layers is not one."""
    found: dict[str, int] = {}

    def collect(plain: Mapping[str, Any]) -> None:
        for name, value in plain.items():
            if isinstance(value, Mapping):
                collect(value)
            elif isinstance(value, int) and not isinstance(value, bool) and name != "n_layer":
                found[name] = max(abs(value), found.get(name, 0))

    collect(asdict(config))
    return found


def _shown(config: Any) -> str:
    sizes = {**_sizes(config), "n_layer": int(getattr(config, "n_layer", 1))}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_N_SHOWN]
    return ", ".join(f"{name} {sizes[name]}" for name in largest)
