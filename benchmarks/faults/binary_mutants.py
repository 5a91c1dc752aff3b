"""Mutants of binary files: damage by chance, and well-formed files with another content.

Each function takes the bytes of a file and returns those of its mutant. Where chance has a part, it comes from a
`random.Random`, so the same seed gives the same mutant.
"""

import json
import math
import struct
from functools import partial
from random import Random
from typing import Any, NamedTuple

from benchmarks.faults.mutants import Mutator, drop_bytes, flip_bit, flip_bits, truncate

# --- damage, in any file ---


def blank(content: bytes, random: Random) -> bytes:
    """Overwrite a random stretch with zeros, as a disk does that lost a block."""
    start = random.randrange(len(content))
    stop = min(len(content), start + 1 + random.randrange(512))
    return content[:start] + bytes(stop - start) + content[stop:]


def append_bytes(content: bytes, random: Random) -> bytes:
    """Add random bytes at the end."""
    return content + random.randbytes(1 + random.randrange(64))


DAMAGES: dict[str, Mutator] = {
    "flipped bit": flip_bit,
    "flipped bits": flip_bits,
    "truncated": truncate,
    "blanked": blank,
    "bytes missing": partial(drop_bytes, most=64),
    "bytes added": append_bytes,
}
"""Damage that can happen to any file, by name."""


def huge_count(content: bytes, random: Random) -> bytes:
    """Write 2^62 in the place of 8 bytes, as a count that asks for memory."""
    start = random.randrange(len(content) - 8)
    return content[:start] + struct.pack("<Q", 2**62) + content[start + 8 :]


def poison_end(content: bytes, random: Random) -> bytes:
    """Write a NaN of 32 bits into the last third, where files have their numbers."""
    start = 4 * random.randrange(len(content) // 6, len(content) // 4)
    return content[:start] + struct.pack("<f", math.nan) + content[start + 4 :]


NUMBERS: dict[str, Mutator] = {**DAMAGES, "huge count": huge_count, "NaN": poison_end}
"""The same, and what a file of counts and numbers has besides."""


# --- safetensors ---


class Safetensors(NamedTuple):
    """A safetensors file: `metadata`, the other entries of the `header` by name, and the `data` they point into."""

    metadata: dict[str, str]
    header: dict[str, dict[str, Any]]
    data: bytes


def parse_safetensors(content: bytes) -> Safetensors:
    """Take a file apart."""
    (n_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + n_bytes])
    return Safetensors(header.pop("__metadata__", {}), header, content[8 + n_bytes :])


def write_safetensors(parts: Safetensors) -> bytes:
    """Put a file together."""
    header = json.dumps({"__metadata__": parts.metadata, **parts.header}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + parts.data


def swap_tensors(content: bytes) -> bytes:
    """Let two tensors of one type and shape and different content change places."""
    parts = parse_safetensors(content)
    entries = list(parts.header.items())
    for place, (one, entry) in enumerate(entries):
        for other, like in entries[place + 1 :]:
            if (entry["dtype"], entry["shape"]) == (like["dtype"], like["shape"]):
                first, second = (parts.data[slice(*item["data_offsets"])] for item in (entry, like))
                if first != second:
                    return write_safetensors(parts._replace(header={**parts.header, one: like, other: entry}))
    raise ValueError("the file has no two tensors of one type and shape")


def poison_safetensors(content: bytes, random: Random, value: float = math.nan) -> bytes:
    """Put a number that is not finite in a random place of a random float32 tensor; the structure stays valid."""
    parts = parse_safetensors(content)
    name = random.choice([name for name, entry in parts.header.items() if entry["dtype"] == "F32"])
    start, stop = parts.header[name]["data_offsets"]
    place = start + 4 * random.randrange((stop - start) // 4)
    data = parts.data[:place] + struct.pack("<f", value) + parts.data[place + 4 :]
    return write_safetensors(parts._replace(data=data))


def rename_tensor(content: bytes, random: Random) -> bytes:
    """Give a random tensor another name."""
    parts = parse_safetensors(content)
    name = random.choice(list(parts.header))
    return write_safetensors(parts._replace(header={n + "2" * (n == name): e for n, e in parts.header.items()}))


def drop_tensor(content: bytes) -> bytes:
    """Leave out the last tensor of the data, so that the others' offsets stay valid."""
    parts = parse_safetensors(content)
    last = max(parts.header, key=lambda name: parts.header[name]["data_offsets"][1])
    header = {name: entry for name, entry in parts.header.items() if name != last}
    return write_safetensors(parts._replace(header=header, data=parts.data[: parts.header[last]["data_offsets"][0]]))


def drop_metadata(content: bytes) -> bytes:
    """Leave out the metadata, and with them every digest."""
    return write_safetensors(parse_safetensors(content)._replace(metadata={"format": "pt"}))


SAFETENSORS: dict[str, Mutator] = {
    **DAMAGES,
    "swapped tensors": lambda content, random: swap_tensors(content),
    "renamed tensor": rename_tensor,
    "missing tensor": lambda content, random: drop_tensor(content),
    "missing metadata": lambda content, random: drop_metadata(content),
    "NaN": poison_safetensors,
    "infinity": lambda content, random: poison_safetensors(content, random, math.inf),
}
"""What can happen to a safetensors file, by name."""
