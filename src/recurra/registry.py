"""Names to classes. A module registers what it defines; a registry imports the modules of its package when asked."""

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

_Entry = TypeVar("_Entry")

own_modules: list[str] = []
"""The modules that a command named with --import; the commands that it prints repeat them."""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Ask whether one of the names that look like `word` was meant; empty if none does.

    >>> did_you_mean("trian", ["train", "eval"])
    'did you mean train?'
    """
    close = near(word, names)
    return f"did you mean {' or '.join(close)}?" if close else ""


def near(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that look like `word`, at most three, the nearest first."""
    return difflib.get_close_matches(word, list(names))


class Registry(Generic[_Entry]):
    """An ordered table of named entries.

    Args:
        kind: what the entries are, in the singular, for error messages ("mixer").
        packages: their modules register themselves and are imported when they are needed: "min-gru" is looked for in
            min_gru.py first, then in all of them.
    """

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self._packages = packages
        self._entries: dict[str, _Entry] = {}

    def register(self, name: str) -> Callable[[_Entry], _Entry]:
        """Return a decorator that files its argument under `name`."""

        def file(entry: _Entry) -> _Entry:
            self._import_named(name, but_not=getattr(entry, "__module__", ""))
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            return entry

        return file

    def __getitem__(self, name: str) -> _Entry:
        if name not in self._entries:
            self._import_named(name)
        if name not in self._entries:
            self._import_all()
        try:
            return self._entries[name]
        except KeyError:
            hint = did_you_mean(name, self)
            own = "import the module that registers your own (commands take --import MODULE)"
            rest = f": {hint}" if hint else f"; there are: {', '.join(self)}; {own}"
            raise ValueError(f"unknown {self.kind} {name!r}{rest}") from None

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _import_named(self, name: str, but_not: str = "") -> None:
        """Import the module of a package that a name is expected in: "min-gru" in min_gru.py."""
        own = name.replace("-", "_")
        for package in self._packages:
            if own in _modules_of(package) and f"{package}.{own}" != but_not:
                import_module(f"{package}.{own}")

    def _import_all(self) -> None:
        for package in self._packages:
            for module in _modules_of(package):
                import_module(f"{package}.{module}")


@cache
def _modules_of(package: str) -> list[str]:
    """List the names of a package's modules, sorted, without importing it."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted(module.name for module in pkgutil.iter_modules(folders or []))
