"""Models prepared to run one step at a time on a CPU: `prepare(model, dtype)`."""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
