"""Figures, one per module: each takes data and returns a `matplotlib.figure.Figure`; `save` writes PNG and SVG."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
