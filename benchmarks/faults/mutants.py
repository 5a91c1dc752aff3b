"""Mutants of a file: damaged on purpose, at places and in ways that follow from a seed."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Random = random.Random
Mutator = Callable[[bytes, Random], bytes]

WILD_VALUES = (None, True, -1, 0, 2**31, 2**63, 10**400, 1e300, "", "x" * 70_000, "\ud800", "1", [], [[]], {}, {"a": 1})
"""Values that JSON and YAML can hold, and hardly any key expects."""
WILD_NUMBERS = (
    "-1",
    "0",
    "999999999",
    "2147483648",
    "1e999",
    "NaN",
    "Infinity",
    "0.5",
    "9" * 5000,
    "1_0",
    "0x1F",
    "''",
)
DEEP = 100_000
"""Levels of a bomb."""


class Mutant(NamedTuple):
    """The content of a damaged file, and the name of what was done to it."""

    name: str
    data: bytes


def mutants(mutators: Mapping[str, Mutator], data: bytes, n: int, seed: int = 0) -> Iterator[Mutant]:
    """Damage a file in `n` ways, each by the next of the mutators: the same ways whenever it is called.

    Args:
        mutators: those of its kind, by name.
        data: the content of the sound file.
        n: the number of mutants.
        seed: another seed damages other places.

    Yields:
        mutants that differ from `data`; fewer than `n` if it leaves nothing to damage.
    """
    names = list(mutators)
    for number in range(n):
        name = names[number % len(names)]
        mutated = mutators[name](data, Random(f"{seed} {number} {name}"))
        if mutated != data:
            yield Mutant(name, mutated)


# --- bytes ---


def flip_bit(data: bytes, draw: Random) -> bytes:
    """Turn over one bit."""
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def flip_bits(data: bytes, draw: Random) -> bytes:
    """Turn over eight bits."""
    for _ in range(8):
        data = flip_bit(data, draw)
    return data


def truncate(data: bytes, draw: Random) -> bytes:
    """Cut the end off."""
    return data[: draw.randrange(len(data))]


def zero_block(data: bytes, draw: Random) -> bytes:
    """Put zeros in the place of up to 512 bytes, as a disk does that lost a sector."""
    place = draw.randrange(len(data))
    size = min(512, len(data) - place)
    return data[:place] + bytes(size) + data[place + size :]


def drop_bytes(data: bytes, draw: Random, *, most: int = 16) -> bytes:
    """Leave out up to `most` bytes."""
    place = draw.randrange(len(data))
    return data[:place] + data[place + draw.randint(1, most) :]


def insert_bytes(data: bytes, draw: Random) -> bytes:
    """Put 4 bytes in that are not UTF-8."""
    place = draw.randrange(len(data) + 1)
    return data[:place] + b"\xff\xfe\x00\x80" + data[place:]


def append_copy(data: bytes, draw: Random) -> bytes:
    """Write the file a second time behind its end."""
    return data + data


def empty(data: bytes, draw: Random) -> bytes:
    """Leave nothing."""
    return b""


# --- lines ---


def drop_line(data: bytes, draw: Random) -> bytes:
    """Leave one line out."""
    lines = data.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(data: bytes, draw: Random) -> bytes:
    """Write one line twice."""
    lines = data.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def swap_lines(data: bytes, draw: Random) -> bytes:
    """Exchange two lines."""
    lines = data.splitlines(keepends=True)
    if len(lines) > 1:
        one, other = draw.sample(range(len(lines)), 2)
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def wild_number(data: bytes, draw: Random) -> bytes:
    """Write another number, or no number, in the place of one."""
    found = list(re.finditer(rb"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?![\w.])", data))
    if not found:
        return data
    match = draw.choice(found)
    return data[: match.start()] + draw.choice(WILD_NUMBERS).encode() + data[match.end() :]


def wild_cell(data: bytes, draw: Random) -> bytes:
    """Write something else into a cell between commas."""
    found = list(re.finditer(rb"[^,\n]+", data))
    match = draw.choice(found)
    cell = draw.choice([b"", b'"', b"a,b", b"-1", b"999999999", b"1e999", b"nan", b"x" * 200_000, b"\0", b"../../x"])
    return data[: match.start()] + cell + data[match.end() :]


# --- JSON ---


def drop_key(data: bytes, draw: Random) -> bytes:
    """Leave a key, or an entry of a list, out."""
    return _changed(data, draw, lambda inside, key: inside.__delitem__(key))


def wild_value(data: bytes, draw: Random) -> bytes:
    """Put a value of another type or size in the place of one."""
    value = draw.choice(WILD_VALUES)
    return _changed(data, draw, lambda inside, key: inside.__setitem__(key, value))


def rename_key(data: bytes, draw: Random) -> bytes:
    """Give a key another name."""

    def rename(inside: Any, key: Any) -> None:
        if isinstance(inside, dict):
            inside[f"{key}_"] = inside.pop(key)

    return _changed(data, draw, rename)


def swap_values(data: bytes, draw: Random) -> bytes:
    """Exchange two values that stand beside each other."""

    def swap(inside: Any, key: Any) -> None:
        other = draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        inside[key], inside[other] = inside[other], inside[key]

    return _changed(data, draw, swap)


def repeat_key(data: bytes, draw: Random) -> bytes:
    """Write a key twice, the second time with another value."""
    found = list(re.finditer(rb'"[^"\\]*":', data))
    if not found:
        return data
    match = draw.choice(found)
    return data[: match.start()] + match.group() + b" 7, " + data[match.start() :]


def deep_json(data: bytes, draw: Random) -> bytes:
    """Open more lists or objects inside each other than a parser has stack for."""
    return draw.choice([b"[", b'{"a":']) * DEEP


def deep_value(data: bytes, draw: Random) -> bytes:
    """Put a list of many levels in the place of a value."""
    return _changed(data, draw, lambda inside, key: inside.__setitem__(key, "@deep@")).replace(
        b'"@deep@"', b"[" * 5000 + b"]" * 5000
    )


def _changed(data: bytes, draw: Random, change: Callable[[Any, Any], None]) -> bytes:
    content = json.loads(data)
    places = list(_places(content))
    if places:
        change(*draw.choice(places))
    return json.dumps(content, indent=1).encode()


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value: the object or list around it, and its key there."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from _places(content[key])


# --- YAML ---


def wild_yaml(data: bytes, draw: Random) -> bytes:
    """Write something else behind a key."""
    found = list(re.finditer(rb":( +)[^\n:{}\[\],]+", data))
    match = draw.choice(found)
    words = [b"null", b"[]", b"{}", b"-1", b"1e400", b".nan", b"9" * 5000, b"*a", b"&a [*a]", b"!!python/none x", b"'"]
    word = draw.choice([*words, b"2001-99-99", b"!!binary x", b"!!set {a}", b"{1: 2}", b"{a: 1, a: 2}", b"x" * 70_000])
    return data[: match.start()] + b": " + word + data[match.end() :]


def indent_line(data: bytes, draw: Random) -> bytes:
    """Move a line to the right or to the left."""
    lines = data.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    lines[place] = b"  " + lines[place] if draw.random() < 0.5 else lines[place].lstrip()
    return b"".join(lines)


def laughs(data: bytes, draw: Random) -> bytes:
    """Add aliases of aliases, which stand for a billion words."""
    lines = [b"a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    for before, name in zip("abcdefgh", "bcdefghi"):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]".encode())
    return data + b"\n" + b"\n".join(lines) + b"\n"


def deep_yaml(data: bytes, draw: Random) -> bytes:
    """Open more lists or mappings inside each other than a parser has stack for."""
    return data + b"\ndeep: " + draw.choice([b"[", b"{a: ", b"- "]) * 20_000


_BYTES: dict[str, Mutator] = {
    mutator.__name__: mutator
    for mutator in (flip_bit, truncate, zero_block, drop_bytes, insert_bytes, append_copy, empty)
}
_LINES: dict[str, Mutator] = {
    mutator.__name__: mutator for mutator in (drop_line, repeat_line, swap_lines, wild_number, flip_bit)
}

TEXT = _BYTES | _LINES
CSV = TEXT | {"wild_cell": wild_cell}
JSON = TEXT | {
    mutator.__name__: mutator
    for mutator in (drop_key, wild_value, rename_key, swap_values, repeat_key, deep_json, deep_value)
}
YAML = TEXT | {mutator.__name__: mutator for mutator in (wild_yaml, indent_line, laughs, deep_yaml)}
