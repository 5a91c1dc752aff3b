"""Whether this machine multiplies bfloat16, and the precision that `training.precision: auto` takes for it."""

import platform
from dataclasses import replace
from time import perf_counter

import torch

from recurra.training.config import TrainingConfig

_SIZE = 192
"""Rows of the matrices that are multiplied to measure: without bfloat16 units one product takes about 10 ms."""


def has_native_bfloat16(device: str) -> bool:
    """Ask whether a device ("cpu" or "cuda") multiplies bfloat16 in units of its own.

    Elsewhere PyTorch computes the same products slowly: a CPU in plain loops or by way of float32, an older GPU by
    emulation.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # nothing else multiplies matrices of bfloat16 fast
        return False
    # oneDNN takes bfloat16 on every CPU with AVX-512, and emulates it on those from before AVX512_BF16
    return _has_units() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def known_precision(config: TrainingConfig, device: str) -> TrainingConfig:
    """Replace `precision: auto` with what suits a device ("cpu" or "cuda"); leave any other precision as it is."""
    if config.precision != "auto":
        return config
    return replace(config, precision="bf16-mixed" if has_native_bfloat16(device) else "32-true")


def precision_note(asked: str, chosen: str, device: str) -> str:
    """Say what a run should be told about its precision; empty if nothing.

    Args:
        asked: `training.precision` of the recipe or the run.
        chosen: what the run computes in.
        device: "cpu" or "cuda".
    """
    if asked == "auto":
        has = "has" if chosen == "bf16-mixed" else "has no"
        return f"note: training.precision auto is {chosen} here: this {_name(device)} {has} native bfloat16"
    if chosen == "bf16-mixed" and not has_native_bfloat16(device):
        ratio = bfloat16_over_float32(device)
        return (
            f"warning: training.precision is bf16-mixed, and this {_name(device)} has no native bfloat16: a matrix "
            f"product takes {ratio:.1f} times as long as in float32; new runs can use 32-true or auto"
        )
    return ""


def bfloat16_over_float32(device: str, rounds: int = 5) -> float:
    """Measure the time of a matrix product in bfloat16 over that in float32: the least of a few rounds of each."""
    one = torch.ones(_SIZE, _SIZE, device=device)
    two = one.bfloat16()
    least = {one: float("inf"), two: float("inf")}
    for _ in range(rounds):
        for matrix in least:
            start = perf_counter()
            matrix @ matrix
            if device == "cuda":
                torch.cuda.synchronize()
            least[matrix] = min(least[matrix], perf_counter() - start)
    return least[two] / least[one]


def _has_units() -> bool:
    """Whether an x86 processor has instructions for products of bfloat16; True on others, where oneDNN knows."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported())


def _name(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"
