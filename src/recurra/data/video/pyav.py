"""PyAV, imported on first use, and how it opens a file."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from recurra.checks import sentence

_REFERRING = frozenset(
    {"concat", "dash", "hls", "image2", "imf", "rtp", "rtsp", "sap", "sdp", "vobsub", "webm_dash_manifest"}
)
"""FFmpeg's formats whose files name other files or addresses, where the pictures are."""


def require_av() -> ModuleType:
    """Import the module `av`. Raises an ImportError that says what to install if it is missing."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        message = sentence("PyAV", "not installed", "for video files", "pip install 'recurra[video]'")
        raise ImportError(message, name="av") from error


def open_container(path: str) -> Any:
    """Open a file with PyAV, by itself: neither a playlist nor a name with an address leads to anything else.

    Raises av.error.ArgumentError for a list of other files, and FFmpeg's other errors.
    """
    options = {"format_whitelist": _self_contained_formats(), "protocol_whitelist": "file"}
    # Titles and authors are not read here, and old files have them in old encodings.
    return require_av().open(path, container_options=options, metadata_errors="replace")


@cache
def _self_contained_formats() -> str:
    """List the formats that FFmpeg may take a file for, as its option wants them."""
    av: Any = require_av()
    return ",".join(sorted(name for name in av.formats_available if not _REFERRING & set(name.split(","))))
