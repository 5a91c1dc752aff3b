"""Single steps as one call into machine code: what a model does for one token, without torch between its operations.

A recorded step (`recorded_step`) still starts several hundred operations, a microsecond or more each, and a pool of
threads for every matrix. Here the model's own forward is written down as instructions once (`step_graph`), and one
Numba function runs them all (`step_kernel`).
"""

from torch import Tensor

from recurra.decoding.packed_linear import MOST_VECTORS
from recurra.decoding.recorded_step import Flat, RecordedStep
from recurra.decoding.step_graph import lower_step
from recurra.decoding.step_memory import StepNotCompiled
from recurra.decoding.step_program import StepProgram
from recurra.state import tensors

TOLERANCE = 1e-5
"""How far a tensor of the first steps' results may be from the model's, over its largest number."""


class CompiledStep(RecordedStep):
    """A recorded step whose recording is compiled; float32, on the CPU.

    Sums and elementwise functions round otherwise than torch's, so that results are the model's to within rounding:
    some 2e-6 of the largest number for a model of 12 layers, which is as far as both are from float64. Results are new
    tensors, and nothing that goes in is changed. The workspace is one; a call while another thread is in one goes
    through the model. So does one with a token that is not in the vocabulary, for the model's own error.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`, its linear layers packed.
        vocab_size: tokens are below it; a few are drawn for the recording and its check.
        batch: rows of the inputs that the recording takes.

    Raises:
        ValueError: the model is in training mode.
        StepNotSteady: a step cannot be recorded (see `RecordedStep`), or the compiled one gives other numbers.
        StepNotCompiled: there is no instruction for an operation, or the batch is above `MOST_VECTORS`, from which on
            torch's matrix products are faster. Both are ValueErrors.
    """

    def __reduce__(self) -> tuple:
        """A copy compiles its own: a program names memory by its addresses."""
        return type(self), (self.model, self.vocab_size, self.batch)

    def _record(self, tokens: Tensor) -> StepProgram:
        if len(tokens) > MOST_VECTORS:
            raise StepNotCompiled(f"the batch is {len(tokens)}; a compiled step takes at most {MOST_VECTORS} rows")
        return StepProgram(lower_step(Flat(self.model, self._state).eval(), [tokens, *tensors(self._like)]))

    def _run(self, inputs: list[Tensor]) -> list[Tensor] | None:
        return self._program.run(inputs) if self._program.takes(inputs) else None

    @staticmethod
    def _agrees(mine: Tensor, right: Tensor) -> bool:
        return mine.shape == right.shape and bool((mine - right).abs().max() <= TOLERANCE * right.abs().max())
