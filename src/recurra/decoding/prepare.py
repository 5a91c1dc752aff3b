"""The fastest form of a model for a stream on a CPU that gives the model's own results."""

from torch import nn

from recurra.decoding.compiled_step import CompiledStep
from recurra.decoding.pack import pack_linear_layers
from recurra.decoding.recorded_step import RecordedStep, StepNotSteady
from recurra.decoding.step_memory import StepNotCompiled


def prepare_for_decoding(model: nn.Module, numbers: str = "float32") -> nn.Module:
    """Pack the linear layers of a copy of `model`, and compile its single steps, or record them, where that can be.

    Steps of recurrences can be; a model whose state counts positions (segment models) or has a growing window keeps
    the Python around its operations. The first compilation on a machine takes some ten seconds.

    Args:
        model: a language model, float32, on the CPU, with `config.vocab_size`.
        numbers: what weights are kept as: "float32", "bfloat16" or "int8" (see `PackedLinear`).

    Raises:
        ValueError: there are no such numbers, or the model is not float32 on the CPU.
    """
    packed = pack_linear_layers(model, numbers)
    for form in (CompiledStep, RecordedStep):
        try:
            return form(packed, packed.config.vocab_size)  # type: ignore[union-attr, arg-type]
        except (StepNotCompiled, StepNotSteady):
            continue
    return packed
