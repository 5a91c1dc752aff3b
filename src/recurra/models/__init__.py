"""Models: stacks of layers under the one contract `y, state = module(x, state)`."""

from recurra.models.block import Block
from recurra.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState

__all__ = ["Block", "LanguageModel", "LanguageModelConfig", "LanguageModelState"]
