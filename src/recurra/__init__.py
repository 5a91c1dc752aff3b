"""Recurra: recurrent sequence models that train in parallel and run as a stream, from the same weights.

Functions and packages are imported on first use. `import recurra` alone therefore does not load torch and registers no
operators: before `torch.export.load`, import the package that has them, such as `recurra.ops.scan`.
"""

from recurra._lazy import attach
from recurra.ops._toolkit import fork as _fork  # noqa: F401  notes forks from here on

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
