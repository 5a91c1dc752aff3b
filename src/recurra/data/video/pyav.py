"""PyAV, imported when it is first needed."""

import importlib
from types import ModuleType


def require_av() -> ModuleType:
    """The module `av`. Raises ImportError that says what to install where it is missing."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ImportError(
            "video files are read and written with PyAV, which is missing: pip install recurra[video]", name="av"
        ) from error
