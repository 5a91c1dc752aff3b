"""A GateLoop trained on Memory Horizon: its gates close at resets in the input."""

from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from recurra.analysis.gates import GateRecord, ResetContrast, record_gates, reset_contrast
from recurra.convert.portable import PortableModel, load_single_file
from recurra.data.memory_horizon import MemoryHorizon, MemoryHorizonConfig
from recurra.streams.stream import Stream

__all__ = ["memory_horizon"]

_FOLDER = Path(__file__).with_name("pretrained_models")
_WEIGHTS, _CARD = _FOLDER / "memory-horizon.safetensors", _FOLDER / "memory-horizon.md"


def memory_horizon() -> "_HorizonModel":
    """Open the trained Memory Horizon model in the package, on the CPU and in evaluation mode.

    >>> horizon = memory_horizon()
    >>> horizon.answer([2, 3, 4])  # 2 * 4 - 3
    5
    """
    return _HorizonModel(load_single_file(_WEIGHTS))


class _HorizonModel:
    """A trained model, with the task that it was trained on."""

    def __init__(self, portable: PortableModel) -> None:
        assert portable.experiment is not None
        assert portable.step is not None
        self.model: nn.Module = portable.model
        self.step: int = portable.step
        self._data = MemoryHorizonConfig(**portable.experiment["data"])

    @property
    def card(self) -> str:
        """The model card: description, training, accuracy and limits."""
        return _CARD.read_text(encoding="utf-8")

    @cached_property
    def data(self) -> MemoryHorizon:
        """The training and test sequences, regenerated from their seed."""
        return self._data.build()

    @property
    def reset_token(self) -> int:
        """The token that empties the list of numbers."""
        return self._data.largest_number + 1

    def stream(self) -> Stream:
        """Start a stream, which can be fed tokens, forked and saved."""
        return Stream(self.model)

    def answer(self, tokens: list[int]) -> int:
        """Return the answer after the last of `tokens`. Raises ValueError if empty, IndexError for unknown tokens."""
        return int(self.stream().feed(tokens).argmax())

    def gates(self, tokens: Int[Tensor, "B L"] | None = None) -> GateRecord:
        """Record |a| and phase of every gate over `tokens`; None takes the first test sequence, (1, L)."""
        return record_gates(self.model, self._test_tokens[:1] if tokens is None else tokens)

    def reset_contrast(self) -> ResetContrast:
        """Compare mean |a| at the resets of all test sequences with mean |a| elsewhere."""
        return reset_contrast(self.gates(self._test_tokens), self.reset_token)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Compute the share of correct answers over all steps of the test sequences."""
        right = self.model(self._test_tokens)[0].argmax(-1) == self.data.targets[self.data.places("test")]
        return float(right.double().mean())

    def draw_gates(self, folder: Path | str) -> list[Path]:
        """Draw |a| and phases over a test sequence into `folder` (GateLoop, Figures 5 and 8); return the files."""
        from recurra.analysis.plots.figure import save  # matplotlib takes long to import
        from recurra.analysis.plots.gates import gate_magnitudes, gate_phases

        gates = self.gates()
        magnitudes = save(gate_magnitudes(gates, reset_token=self.reset_token), folder, "gate-magnitudes")
        return magnitudes + save(gate_phases(gates), folder, "gate-phases")

    @property
    def _test_tokens(self) -> Int[Tensor, "N L"]:
        return self.data.tokens[self.data.places("test")]
