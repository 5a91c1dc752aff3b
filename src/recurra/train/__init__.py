"""From a recipe to a trained model."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
