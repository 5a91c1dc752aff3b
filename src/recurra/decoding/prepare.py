"""The fastest form of a model for streams on a CPU that gives the model's own results."""

from torch import nn

from recurra.checks import sentence
from recurra.decoding.compiled_step import CompiledStep
from recurra.decoding.lay_out import lay_out_linear_layers
from recurra.decoding.recorded_step import RecordedStep, StepNotSteady
from recurra.decoding.step_memory import StepNotCompiled
from recurra.kernels.backends import NUMBA_IS_MISSING


def prepare_for_decoding(model: nn.Module, numbers: str = "float32") -> nn.Module:
    """Copy `model` with its linear layers laid out for decoding, and compile or record its single steps if possible.

    The result is called as the model is, under torch.no_grad(), gives states of the same form, and serves one stream
    or several side by side. It does not follow later changes of the model's weights. Steps of recurrences can be
    compiled or recorded. A model whose state counts positions (segment models) or has a growing window keeps the Python
    around its operations. The first compilation on a machine takes about ten seconds.

    Args:
        model: a language model, float32, on the CPU, with `config.vocab_size`.
        numbers: how weights are kept: "float32", "bfloat16", "int8" or "int4".

    Raises:
        ValueError: the choice of numbers does not exist, or the model is not float32 on the CPU, or has no such config.
        RuntimeError: Numba is missing.
    """
    if NUMBA_IS_MISSING:
        mend = "weights=None, or --weights model of `recurra serve`, decodes with the model itself"
        raise RuntimeError(f"{NUMBA_IS_MISSING}; expected it for weights that are laid out for decoding: {mend}")
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ValueError(sentence("model.config.vocab_size", repr(vocab_size), "the number of tokens"))
    laid_out = lay_out_linear_layers(model, numbers)
    for form in (CompiledStep, RecordedStep):
        try:
            return form(laid_out, vocab_size)
        except (StepNotCompiled, StepNotSteady):
            continue
    return laid_out
