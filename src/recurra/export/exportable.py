"""Which models can be exported, and why others cannot."""

import torch
from torch import nn

from recurra.mixers import GRU, GateLoopAttention, LinearRNN, RelativeAttention, RotaryAttention
from recurra.mixers.linear_rnn import DenseRecurrence
from recurra.models import LanguageModel

_WANTED = "one graph for any number of tokens, whose state has one shape at every step"


def require_exportable(model: nn.Module) -> LanguageModel:
    """Return the model, or refuse one that has no graph for any number of tokens.

    Raises:
        ValueError: the message says why.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"a {type(model).__name__} cannot be exported: its state grows within a segment, and a call takes another "
            f"way at the end of one, while an export is {_WANTED}. Expected a LanguageModel"
        )
    for number, block in enumerate(model.blocks):
        assert isinstance(block.mixer, nn.Module)
        reason = _why_not(block.mixer)
        if reason:
            raise ValueError(f"the mixer of block {number} cannot be exported: {reason}, while an export is {_WANTED}")
    types = {parameter.dtype for parameter in model.parameters()}
    if types != {torch.float32}:
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise ValueError(f"the model's parameters are of type {names}; expected float32: convert it with model.float()")
    if model.embedding.weight.device.type != "cpu":
        raise ValueError(f"the model is on {model.embedding.weight.device}; expected it on the CPU: model.cpu()")
    return model


def _why_not(mixer: nn.Module) -> str:
    if isinstance(mixer, (GateLoopAttention, RotaryAttention)):
        name = "gateloop-attention" if isinstance(mixer, GateLoopAttention) else "rotary-attention"
        return f"{name} keeps the last steps themselves, and their number grows up to its window"
    if isinstance(mixer, RelativeAttention):
        return "relative-attention keeps the steps of the open segment, and their number grows up to the segment's end"
    if isinstance(mixer, GRU):
        return "gru runs step by step, and a graph of it has as many steps as the prompt that it was made with"
    if isinstance(mixer, LinearRNN) and isinstance(mixer.recurrence, DenseRecurrence):
        return 'linear-rnn with transition "dense" multiplies matrices in a tree whose depth follows the length'
    return ""
