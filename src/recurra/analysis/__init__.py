"""Analysis of models: cost, gates and gradients.

Figures are in `recurra.analysis.plots`; only this package needs matplotlib.
"""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
