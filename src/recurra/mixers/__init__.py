"""Mixers: modules over time, `y, state = mixer(x, state)`, one file each, imported on first use."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
