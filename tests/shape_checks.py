"""The shapes in the signatures of recurra, checked while the tests run: by jaxtyping's import hook and beartype."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch
from beartype import beartype

_CHECKED = [
    f"recurra.{name}"
    for name in (
        *("analysis", "convert", "data", "layers", "lengths", "mixers", "models", "pretrained", "state", "streams"),
        *(f"ops.{name}" for name in ("cells", "delta_rule", "gate_loop", "scan", "selective_scan")),
        *("train", "video"),
    )
]
_COMPILED = re.compile(r"(cpu|triton|kernels?)$")
"""Modules whose functions Numba and Triton compile, by the ends of their names: they stay as they are."""

MOST_CALLS = 8
"""How many calls of a function are looked at in one test. A stream of a thousand steps has a thousand calls of one
kind."""
_PLAIN = (bool, int, float, str, type(None))

_test = 0
_off = False


def begin_test(checked: bool = True) -> None:
    """Look at the first calls of every function once more, or at none: torch.compile would trace the checks."""
    global _test, _off
    _test += 1
    _off = not checked


def install() -> None:
    """Check the functions of every module of recurra that is imported from now on."""
    # what the decorators that the hook puts in call
    jaxtyping.jaxtyped = functools.partial(kinds_of_calls_checked, jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(_CHECKED, f"{__name__}.check")


def kinds_of_calls_checked(jaxtyped: Callable, function: Any = None, *, typechecker: Callable) -> Any:
    """Decorate as jaxtyping does, but check each kind of call once, among the first `MOST_CALLS` of every test."""
    if function is None:
        return functools.partial(kinds_of_calls_checked, jaxtyped, typechecker=typechecker)
    if not inspect.isfunction(function):
        return jaxtyped(function, typechecker=typechecker)
    if _COMPILED.search(function.__module__) or "jaxtyping" not in repr(function.__annotations__):
        return function
    checked, test, calls = None, 0, 0
    passed: set[tuple] = set()

    @functools.wraps(function)
    def first_of_a_kind(*arguments: Any, **options: Any) -> Any:
        nonlocal checked, test, calls
        if _off:
            return function(*arguments, **options)
        if test != _test:
            test, calls = _test, 0
        calls += 1
        if calls > MOST_CALLS:
            return function(*arguments, **options)
        kind = (*map(_kind, arguments), *map(_kind, options.items()))
        if kind in passed:
            return function(*arguments, **options)
        if checked is None:  # decorating all functions of the package takes seconds, and a file of tests calls a few
            checked = jaxtyped(function, typechecker=typechecker)
        result = checked(*arguments, **options)
        passed.add(kind)
        return result

    return first_of_a_kind


def _kind(value: Any) -> Any:
    """Return what two calls with the same outcome have in common: types, shapes, and the settings of objects."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return value.layout, value.dtype
        return tuple(n if type(n) is int else str(n) for n in value.shape), value.dtype  # symbolic sizes have no hash
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, (tuple, list)):  # the state of a module
        return (type(value), *map(_kind, value))
    settings = getattr(value, "__dict__", None) or {}
    return type(value), frozenset((name, item) for name, item in settings.items() if type(item) in _PLAIN)


def check(stand_in: Callable) -> Callable:
    """Let beartype check a stand-in for a function.

    jaxtyping makes two of each function: one to check the arguments before the call, and one to check what was returned
    and the arguments once more. The second leaves the arguments alone here, which saves a third of the time.
    """
    returned = stand_in.__annotations__.get("return", Any)
    if returned is not Any:
        stand_in.__annotations__ = {"return": returned}
    return beartype(stand_in)
