"""Video: files, clips of several segments, data sets, and a generated one. PyAV is imported on first use."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
