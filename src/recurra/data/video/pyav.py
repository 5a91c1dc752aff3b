"""PyAV, imported on first use."""

import importlib
from types import ModuleType

from recurra.checks import sentence


def require_av() -> ModuleType:
    """Import the module `av`. Raises an ImportError that says what to install if it is missing."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        message = sentence("PyAV", "not installed", "for video files", "pip install recurra[video]")
        raise ImportError(message, name="av") from error
