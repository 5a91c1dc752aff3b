"""Numba's cache on disk, whose failures are no failures of the kernels: they are then compiled again, in memory."""

import glob
import os
import warnings
from contextlib import suppress
from typing import Any

from numba.core.caching import FunctionCache

_has_warned = False


class TolerantCache(FunctionCache):
    """Keeps a function's machine code on disk while the disk can, and warns once in a process if it cannot.

    Numba raises what reading a damaged file or writing to a full disk raises, in the first call of the function, and
    again in every process until someone removes the file.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None if there is none or it cannot be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever it is that unpickling damaged bytes raises
            self._give_up("read", error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for a signature, if it can be written."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            self._give_up("written", error)
            self.disable()

    def _give_up(self, what: str, error: Exception) -> None:
        """Warn, and remove all files of the function: its index may name files that were not written."""
        _warn_once(
            f"the compiled kernels in {self.cache_path} cannot be {what} ({type(error).__name__}: {error}); they are "
            f"compiled again, which takes a while"
        )
        for path in glob.glob(f"{glob.escape(os.path.join(self.cache_path, self._impl.filename_base))}.*"):
            with suppress(OSError):
                os.unlink(path)


def _warn_once(message: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=4)
