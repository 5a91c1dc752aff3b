"""Streams through a trained language model: feeding, sampling, speculating, saving, and many of them at once."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
