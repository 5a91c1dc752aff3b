"""The shapes in the signatures of recurra, checked while the tests run: by jaxtyping's import hook and beartype."""

from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import install_import_hook

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
    "recurra.lengths.packed",
    "recurra.mixers",
    "recurra.models",
    "recurra.packed_state",
    "recurra.runs",
    "recurra.scan.associative",
    "recurra.scan.convolution",
    "recurra.scan.linear",
    "recurra.scan.reference",
    "recurra.ssm",
    "recurra.state",
    "recurra.training",
]


def install() -> None:
    """Check the functions of every module of recurra that is imported from now on."""
    install_import_hook(_CHECKED, f"{__name__}.check")


def check(stand_in: Callable) -> Callable:
    """Let beartype check a stand-in for a function.

    jaxtyping makes two of each function: one to check the arguments before the call, and one to check what was returned
    and the arguments once more. The second leaves the arguments alone here, which saves a third of the time.
    """
    returned = stand_in.__annotations__.get("return", Any)
    if returned is not Any:
        stand_in.__annotations__ = {"return": returned}
    return beartype(stand_in)
