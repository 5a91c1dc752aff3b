"""The shapes in the signatures of recurra, checked while the tests run: by jaxtyping's import hook and beartype."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype

# What Numba compiles stays as it is, and so do the wrappers that torch's dispatcher calls: the functions around them
# carry the shapes.
_CHECKED = [
    "recurra.analysis",
    "recurra.cells",
    "recurra.cli",
    "recurra.convert",
    "recurra.data",
    "recurra.evaluation",
    "recurra.gateloop.chunk",
    "recurra.gateloop.modes",
    "recurra.gateloop.operator",
    "recurra.gateloop.polar",
    "recurra.gateloop.softmax",
    "recurra.generation",
    "recurra.huggingface.cache",
    "recurra.huggingface.folder",
    "recurra.huggingface.modeling",
    "recurra.huggingface.tokenizer",
    "recurra.layers",
    "recurra.lengths",
    "recurra.mixers",
    "recurra.models",
    "recurra.runs",
    "recurra.scan.associative",
    "recurra.scan.convolution",
    "recurra.scan.linear",
    "recurra.scan.reference",
    "recurra.ssm",
    "recurra.state",
    "recurra.training",
]

MOST_CALLS = 4
"""How many calls of a function are checked in one test. A stream of a thousand steps has a thousand equal calls, and
checking them all took two fifths of the time of the contract suite."""

_test = 0


def begin_test() -> None:
    """Check the first calls of every function once more: another test begins."""
    global _test
    _test += 1


def install() -> None:
    """Check the functions of every module of recurra that is imported from now on."""
    jaxtyping.jaxtyped = functools.partial(first_calls_checked, jaxtyping.jaxtyped)  # what the hook's decorators call
    jaxtyping.install_import_hook(_CHECKED, f"{__name__}.check")


def first_calls_checked(jaxtyped: Callable, function: Any = None, *, typechecker: Callable) -> Any:
    """Decorate as jaxtyping does, but leave alone what is called more than `MOST_CALLS` times in a test."""
    if function is None:
        return functools.partial(first_calls_checked, jaxtyped, typechecker=typechecker)
    if not inspect.isfunction(function):
        return jaxtyped(function, typechecker=typechecker)
    checked, test, calls = None, 0, 0

    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal checked, test, calls
        if test != _test:
            test, calls = _test, 0
        calls += 1
        if calls > MOST_CALLS:
            return function(*arguments, **options)
        if checked is None:  # decorating all functions of the package takes seconds, and a file of tests calls a few
            checked = jaxtyped(function, typechecker=typechecker)
        return checked(*arguments, **options)

    return counted


def check(stand_in: Callable) -> Callable:
    """Let beartype check a stand-in for a function.

    jaxtyping makes two of each function: one to check the arguments before the call, and one to check what was returned
    and the arguments once more. The second leaves the arguments alone here, which saves a third of the time.
    """
    returned = stand_in.__annotations__.get("return", Any)
    if returned is not Any:
        stand_in.__annotations__ = {"return": returned}
    return beartype(stand_in)
