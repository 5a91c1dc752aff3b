"""Weights of other code bases, by their own names, for the models here; language models in a single file."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
