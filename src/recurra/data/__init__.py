"""Data sets as numbered batches: the Memory Horizon task and text corpora; videos are in `recurra.video`."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
