"""One token for every row of a batch, each by its own settings and its own generator."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.generation.sampling import SMALLEST_TEMPERATURE, SamplingConfig, penalise_repetition, sample
from recurra.kernels.backends import choose_backend
from recurra.layers.precision import at_least_float32


class RowChoice(NamedTuple):
    """How one row chooses.

    config: its settings.
    generator: the only source of chance, on the CPU; unused at temperature 0.
    recent: its last tokens, oldest first, for the repetition penalty.
    """

    config: SamplingConfig
    generator: torch.Generator
    recent: Sequence[int] = ()


def choose(logits: Float[Tensor, "B V"], rows: Sequence[RowChoice], *, backend: str = "auto") -> list[int | ValueError]:
    """Choose a token for each row; beside which rows it stands makes no difference to a row.

    Args:
        logits: after the last token of each row.
        rows: how each chooses.
        backend: "numba" runs one kernel over all rows, "reference" runs `sample` for one row after the other, on the
            CPU too; "auto" takes the kernel where Numba is installed. Their tokens differ only where rounding decides.

    Returns:
        A token for every row, or the error of a row that has none to choose (see `draw`).

    Raises:
        ValueError, RuntimeError: the backend does not exist, or cannot run here.
    """
    logits = logits.detach().cpu()
    if choose_backend(backend, logits.device) == "reference":
        return [_alone(row, choice) for row, choice in zip(logits, rows)]
    tokens = _by_kernel(at_least_float32(logits), rows)
    return [token if token >= 0 else _alone(row, choice) for token, row, choice in zip(tokens, logits, rows)]


def _alone(logits: Tensor, row: RowChoice) -> int | ValueError:
    try:
        recent = torch.tensor(row.recent, dtype=torch.int64, device=logits.device)
        return int(sample(logits, row.config, row.generator, recent))
    except ValueError as error:
        return error


def _by_kernel(logits: Tensor, rows: Sequence[RowChoice]) -> list[int]:
    """The rows' tokens; -1 for one that has none."""
    from recurra.generation.choice_kernels import choose_kernel

    n_rows, n_words = logits.shape
    settings = [_in_numbers(row.config, n_words) for row in rows]
    temperatures, ks, ps, belows = zip(*settings) if settings else ((), (), (), ())
    shares = [
        torch.rand((), dtype=torch.float64, device="cpu", generator=row.generator).item()
        if row.config.temperature
        else 0.0
        for row in rows
    ]
    tokens = torch.empty(n_rows, dtype=torch.int64, device="cpu")
    choose_kernel(
        _penalised(logits, rows).contiguous().numpy(),
        torch.tensor(temperatures, dtype=logits.dtype, device="cpu").numpy(),
        torch.tensor(ks, dtype=torch.int64, device="cpu").numpy(),
        torch.tensor(ps, dtype=torch.float64, device="cpu").numpy(),
        torch.tensor(belows, dtype=logits.dtype, device="cpu").numpy(),
        torch.tensor(shares, dtype=torch.float64, device="cpu").numpy(),
        tokens.numpy(),
        jobs=n_rows,
        work=n_rows * n_words,
    )
    return tokens.tolist()


def _in_numbers(config: SamplingConfig, n_words: int) -> tuple[float, int, float, float]:
    """Temperature, k, p, and how far below the largest a logit may lie."""
    if 0 < config.temperature < SMALLEST_TEMPERATURE:
        return 1.0, 1, 1.0, -math.inf  # the likeliest, and those that equal it
    k = n_words if config.top_k is None else min(config.top_k, n_words)
    below = -math.inf if config.min_p is None else math.log(config.min_p)
    return config.temperature, k, 1.0 if config.top_p is None else config.top_p, below


def _penalised(logits: Tensor, rows: Sequence[RowChoice]) -> Tensor:
    """The logits after each row's repetition penalty; a copy where a row has one."""
    penalties = {
        place: row.config for place, row in enumerate(rows) if row.config.repetition_penalty != 1 and len(row.recent)
    }
    if penalties:
        logits = logits.clone()
    for place, config in penalties.items():
        recent = torch.tensor(rows[place].recent[-config.repetition_window :], dtype=torch.int64, device="cpu")
        logits[place] = penalise_repetition(logits[place], recent, config.repetition_penalty)
    return logits
