"""What a kernel is made of beyond its own file, the only one that Numba's cache on disk looks at."""

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable

# Unindented imports only: a module that a function imports may be loaded in one process and not in another, and the
# hash would differ.
_IMPORTS = re.compile(r"^(?:from|import)\s+([\w.]+)", re.MULTILINE)


@functools.cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # installed without its source, or built into Python
        return ""


def _imported(module: str) -> set[str]:
    """Name the loaded modules that `module` imports from its own package and from this one."""
    packages = {module.partition(".")[0], __name__.partition(".")[0]}
    named = set(_IMPORTS.findall(_source(module)))
    return {name for name in named if name.partition(".")[0] in packages and name in sys.modules}


@functools.cache
def _digest(module: str) -> str:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = _imported(waiting.pop()) - found - {module}
        found |= new
        waiting.extend(new)
    text = "\n".join(f"{name}\n{_source(name)}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_of_imports(function: Callable) -> str:
    """Hash the sources that the module of `function` imports from its package and this one, directly or indirectly.

    The module's own file is not included: Numba notices its changes.

    Returns:
        12 hexadecimal digits, which change whenever one of these files does.
    """
    return _digest(function.__module__)
