"""Layers without a state: embeddings, softmaxes, dropouts, attention and feed-forward networks."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
