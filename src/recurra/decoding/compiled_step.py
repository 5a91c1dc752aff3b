"""Single steps as one call into machine code: what a model does for one token, without torch between its operations.

A recorded step (`recorded_step`) still starts several hundred operations, a microsecond or more each, and a thread pool
for every matrix. Here the model's own forward is written down once as instructions (`step_graph`), and one Numba
function runs them all (`step_kernel`).
"""

from typing import Any

from torch import Tensor

from recurra.decoding.linear import DecodingLinear
from recurra.decoding.recorded_step import FlatStep, RecordedStep
from recurra.decoding.step_graph import lower_step
from recurra.decoding.step_program import StepProgram
from recurra.state import tensors

TOLERANCE = 1e-5
"""How far a tensor of the first steps' results may be from the model's, relative to its largest number."""
TOLERANCE_IF_ROUNDED = 0.2
"""The same for the difference's length over the tensor's, where inputs of products are rounded: one between two codes
can fall either way, and each layer passes on what that moved. An operation that is wrong moves all of it."""


class CompiledStep(RecordedStep):
    """A recorded step whose recording is compiled; float32, on the CPU.

    Sums and elementwise functions round differently from torch's. Results differ from the model's by about 2e-6 of the
    largest number for a model of 12 layers, as much as both differ from float64; with "int8" and "int4" by some
    hundredths, as much as rounding moves them, where inputs are between two codes. A row's results do not depend on the
    batch that it is in. Results are new tensors, and no input is changed. A call made while another thread is inside
    one of the same batch size goes through the model, because there is one workspace per size. So does a call with a
    token that is not in the vocabulary, so that the model raises its own error.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`; fastest if its linear layers are laid out for
            decoding.
        vocab_size: tokens are below it; a few are drawn to record the step and to check it.

    Raises:
        ValueError: the model is in training mode.
        StepNotSteady: a step cannot be recorded (see `RecordedStep`), or the compiled step gives other numbers.
        StepNotCompiled: an operation has no instruction. Both are ValueErrors.
    """

    def _record(self, tokens: Tensor, like: Any) -> StepProgram:
        return StepProgram(lower_step(FlatStep(self.model, like).eval(), [tokens, *tensors(like)]))

    def _agrees(self, mine: Tensor, right: Tensor) -> bool:
        if mine.shape != right.shape or not mine.numel():
            return mine.shape == right.shape
        if self._rounds_inputs():
            return bool((mine - right).norm() <= TOLERANCE_IF_ROUNDED * right.norm())
        return bool((mine - right).abs().max() <= TOLERANCE * right.abs().max())

    def _carried(self, mine: list[Tensor], expected: Any) -> list[Tensor]:
        return list(tensors(expected)) if self._rounds_inputs() else mine  # so that differences do not add up

    def _rounds_inputs(self) -> bool:
        return any(isinstance(part, DecodingLinear) and part.rounds_inputs for part in self.model.modules())
