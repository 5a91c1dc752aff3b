"""What a checkpoint holds, key by key, and the check that a file holds just that."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from recurra.checks import kind_of, sentence
from recurra.files.weights import require_finite

Check = Callable[[str, Any], None]
"""Raises a ValueError that begins with the name if the value does not fit."""


def require_payload(payload: Mapping[str, Any], path: Path) -> None:
    """Refuse a payload in which a key is missing or unknown, or a value has another type; weights must be finite.

    Raises:
        ValueError: naming the first such key and the file.
    """
    for section, check in _SECTIONS.items():
        if section in payload:
            check(f"{section} in {path}", payload[section])
        elif section not in _OPTIONAL:
            raise ValueError(sentence(str(path), f"without {section}", f"a checkpoint with {', '.join(_SECTIONS)}"))
    if unknown := payload.keys() - _SECTIONS.keys():
        came = f"a checkpoint with {', '.join(sorted(map(repr, unknown)))}"
        raise ValueError(sentence(str(path), came, f"one with {', '.join(_SECTIONS)}"))
    require_finite(payload["model"], path)
    if payload["average"] is not None:
        require_finite(payload["average"]["weights"], path)


def require_plain(payload: Mapping[str, Any], path: Path) -> None:
    """Refuse a payload with anything that a checkpoint could not be read back with.

    Raises:
        ValueError: naming the first such value.
    """
    for section, value in payload.items():
        _plain(f"{section} in {path}", value)


def _count(name: str, value: Any) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool) and value >= 0, name, value, "a count, 0 or more")


def _number(name: str, value: Any) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    _require(fits, name, value, "a finite number")


def _any_number(name: str, value: Any) -> None:
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), name, value, "a number")


def _string(name: str, value: Any) -> None:
    _require(isinstance(value, str), name, value, "a string")


def _key(name: str, value: Any) -> None:
    _require(isinstance(value, (int, str)), name, value, "a string or a whole number")


def _tensor(name: str, value: Any) -> None:
    _require(isinstance(value, Tensor), name, value, "a tensor")


def _plain(name: str, value: Any) -> None:
    """Numbers, strings, None and tensors, in lists and dicts; the keys of these are names or whole numbers."""
    if isinstance(value, Mapping):
        _plain_by_key(name, value)
    elif isinstance(value, (list, tuple)):
        if not _NUMBERS.issuperset(map(type, value)):  # the generators' states are lists of hundreds of numbers
            _plain_list(name, value)
    else:
        fits = value is None or isinstance(value, (bool, int, float, str, Tensor))
        _require(fits, name, value, "plain data: numbers, strings, None and tensors, in lists and dicts")


def _list(check: Check) -> Check:
    def check_list(name: str, value: Any) -> None:
        _require(isinstance(value, (list, tuple)), name, value, "a list")
        for number, item in enumerate(value):
            check(f"[{number}] of {name}", item)

    return check_list


def _by_name(check: Check) -> Check:
    return _by_key(_string, check)


def _by_key(check_key: Check, check: Check) -> Check:
    def check_mapping(name: str, value: Any) -> None:
        _require(isinstance(value, Mapping), name, value, "a dict")
        for key, item in value.items():
            check_key(f"a key of {name}", key)
            check(f"{key} of {name}", item)

    return check_mapping


def _record(optional: Sequence[str] = (), *, open_ended: bool = False, **checks: Check) -> Check:
    """A dict with these keys; `optional` ones may be missing, and only an `open_ended` one may have others."""

    def check_record(name: str, value: Any) -> None:
        _plain_by_name(name, value)
        for key, check in checks.items():
            if key in value:
                check(f"{key} of {name}", value[key])
            else:
                _require(key in optional, name, value, f"a dict with {key}")
        if not open_ended:
            _require(value.keys() <= checks.keys(), name, value, f"a dict with {', '.join(checks)} alone")

    return check_record


def _optimizer(name: str, value: Any) -> None:
    # Not a record: the states of parameters are by number. A registered optimiser may add keys.
    _anything_by_name(name, value)
    _require(value.keys() >= {"state", "param_groups"}, name, value, "a dict with state, param_groups")
    for key, item in value.items():
        {"state": _states, "param_groups": _groups}.get(key, _plain)(f"{key} of {name}", item)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _one_or_list(check: Check) -> Check:
    """One value, or one for each rank."""
    return lambda name, value: (_list(check) if isinstance(value, list) else check)(name, value)


def _require(fits: bool, name: str, value: Any, expected: str) -> None:
    if not fits:
        came = repr(value) if isinstance(value, (bool, int, float)) else kind_of(value)
        if isinstance(value, Mapping):
            came = f"a dict with {', '.join(sorted(map(str, value))[:9]) or 'nothing'}"
        raise ValueError(sentence(name, came, expected))


_NUMBERS = frozenset({bool, int, float})
_weights = _by_name(_tensor)
_anything_by_name = _by_name(lambda name, value: None)
_plain_by_name = _by_name(_plain)
_plain_by_key = _by_key(_key, _plain)
_plain_list = _list(_plain)
_group = _record(open_ended=True, name=_string, params=_list(_count), lr=_number, peak_lr=_number, weight_decay=_number)
_groups = _list(_group)
_states = _by_key(_count, _plain_by_name)
_score = _record(("accuracy", "since_best"), step=_count, loss=_number, accuracy=_number, since_best=_count)
_numpy_key = _record(key=_list(_count), pos=_count)

_random = _record(
    python=_list(_plain),
    numpy=_record(bit_generator=_string, state=_numpy_key, has_gauss=_count, gauss=_number),
    torch=_tensor,
    cuda=_list(_tensor),
)
_sums = _record(loss=_any_number, n_targets=_count, n_tokens=_count, seconds=_number)

_SECTIONS: dict[str, Check] = {
    "format": _string,
    "format_version": _count,
    "versions": _by_name(_string),
    "config": _plain_by_name,
    "position": _record(step=_count, epoch=_count, batch=_count, tokens=_count, seconds=_number),
    "model": _weights,
    "average": _or_none(_record(weights=_weights, n_averaged=_count)),
    "optimizer": _or_none(_optimizer),
    "state": _plain,
    "window": _or_none(_sums),
    "levels": _record(level=_count, epoch=_sums),
    "scores": _record(("last", "best"), last=_score, best=_score),
    "resumed_at": _list(_count),
    "random": _or_none(_one_or_list(_random)),
    "converted_from": _string,
}
_OPTIONAL = frozenset({"levels", "resumed_at", "converted_from"})
"""Checkpoints before `resumed_at` and `levels` lack them; `recurra convert` alone writes `converted_from`."""
