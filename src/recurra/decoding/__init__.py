"""Models prepared to run one step at a time on a CPU: the same modules, weights laid out to be read once a step, and
single steps compiled or recorded.
"""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
