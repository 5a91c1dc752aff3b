"""Numba's cache on disk: safe when processes share it, and keyed by every source that a kernel is made of."""

import functools
import glob
import hashlib
import inspect
import logging
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

_LOG = logging.getLogger("recurra.kernels")
_has_warned = _has_announced = False


class _KeyedFiles(IndexDataCacheFile):
    """One file for each signature, named by its key, which stands in the file too. There is no index."""

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        super().__init__(cache_path, filename_base, source_stamp)
        self._base = filename_base

    def flush(self) -> None:
        """Remove all files of the function."""
        for path in glob.glob(f"{glob.escape(os.path.join(self._cache_path, self._base))}.*.nbc"):
            with suppress(OSError):
                os.unlink(path)

    def save(self, key: Any, data: Any) -> None:
        """Write the file of a key, in place of an older one."""
        self._save_data(self._name_of(key), (self._identity(key), self._dump(data)))

    def load(self, key: Any) -> Any:
        """Return the data of a key; None if there are none, or if they belong to other sources or another key."""
        try:
            identity, data = self._load_data(self._name_of(key))
        except FileNotFoundError:
            return None
        return pickle.loads(data) if identity == self._identity(key) else None

    def _identity(self, key: Any) -> tuple:
        return self._version, self._source_stamp, key

    def _name_of(self, key: Any) -> str:
        return f"{self._base}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"


class TolerantCache(FunctionCache):
    """Keeps a function's machine code on disk while the disk can, and warns once in a process if it cannot.

    Numba raises what reading a damaged file or writing to a full disk raises, in the first call of the function, and
    again in every process until someone removes the file.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _KeyedFiles(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None if there is none or it cannot be read."""
        global _has_announced
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # whatever it is that unpickling damaged bytes raises
            self._give_up("read", error)
            return None
        if found is None:
            _LOG.debug("compiling %s.%s", self._py_func.__module__, self._py_func.__name__)
        if found is None and not _has_announced:
            _has_announced = True
            _LOG.info("compiling kernels for this processor, which takes seconds; kept in %s", self.cache_path)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for a signature, if it can be written."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            self._give_up("written", error)
            self.disable()

    def _give_up(self, what: str, error: Exception) -> None:
        """Warn once in a process, and remove all files of the function."""
        global _has_warned
        if not _has_warned:
            _has_warned = True
            warnings.warn(
                f"the compiled kernels in {self.cache_path} cannot be {what} ({type(error).__name__}: {error}); they "
                f"are compiled again, which takes a while",
                RuntimeWarning,
                stacklevel=3,
            )
        self.flush()


# Unindented imports only: a module that a function imports may be loaded in one process and not in another, and the
# hash would differ.
_IMPORTS = re.compile(r"^(?:from|import)\s+([\w.]+)", re.MULTILINE)


@functools.cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # installed without its source, or built into Python
        return ""


@functools.cache
def _digest(module: str) -> str:
    packages = {module.partition(".")[0], __name__.partition(".")[0]}
    found: set[str] = set()
    waiting = [module]
    while waiting:
        named = set(_IMPORTS.findall(_source(waiting.pop()))) - found - {module}
        new = {name for name in named if name.partition(".")[0] in packages and name in sys.modules}
        found |= new
        waiting.extend(new)
    text = "\n".join(f"{name}\n{_source(name)}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_of_imports(function: Callable) -> str:
    """Hash the sources that the module of `function` imports from its package and this one, directly or indirectly.

    The module's own file is not included: Numba notices its changes. The 12 hexadecimal digits change whenever one of
    these files does.
    """
    return _digest(function.__module__)
