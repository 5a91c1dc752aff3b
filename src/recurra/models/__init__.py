"""Models: stacks of layers under the one contract `y, state = module(x, state)`, imported when they are first used."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
