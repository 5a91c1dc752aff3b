"""Which models can be exported, and why others cannot."""

import torch
from torch import nn

from recurra.checks import kind_of, sentence
from recurra.models import LanguageModelShell

_WANTED = "one graph for any number of tokens, whose state has one shape at every step"


def require_exportable(model: nn.Module) -> LanguageModelShell:
    """Return the model, or refuse one that has no graph for any number of tokens.

    Raises:
        TypeError: it is not a language model.
        ValueError: it cannot be exported; the message says why.
    """
    if not isinstance(model, LanguageModelShell):
        raise TypeError(sentence("model", kind_of(model), "a language model"))
    if reason := model.why_not_exportable():
        raise ValueError(f"the {type(model).__name__} cannot be exported: {reason}; expected {_WANTED}")
    types = {parameter.dtype for parameter in model.parameters()}
    if types != {torch.float32}:
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise ValueError(f"the model's parameters are of type {names}; expected float32: convert it with model.float()")
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ValueError(f"the model is on {device}; expected it on the CPU: use model.cpu()")
    return model
