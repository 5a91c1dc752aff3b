"""Names to classes. A module registers what it defines; a registry imports the modules of its package when asked."""

import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """An ordered table of named entries.

    Args:
        kind: what the entries are, in the singular, for error messages ("mixer").
        packages: their modules register themselves and are imported when they are needed: "min-gru" is looked for in
            min_gru.py first, then in all of them.
    """

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self._packages = packages
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that files its argument under `name`.

        Raises:
            ValueError: when the name is taken by something else.
        """

        def file(entry: Entry) -> Entry:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            return entry

        return file

    def __getitem__(self, name: str) -> Entry:
        own = name.replace("-", "_")
        for package in self._packages:
            if name not in self._entries and own in modules_of(package):
                import_module(f"{package}.{own}")
        if name not in self._entries:
            self._import_all()
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"unknown {self.kind} {name!r}; there are: {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _import_all(self) -> None:
        for package in self._packages:
            for module in modules_of(package):
                import_module(f"{package}.{module}")


@cache
def modules_of(package: str) -> list[str]:
    """List the names of a package's modules, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(import_module(package).__path__))


def find_public(package: str, name: str) -> Any:
    """Find one of a package's public names in its modules: the package's `__getattr__`, so that importing it is quick.

    Raises:
        AttributeError: the package has no such public name.
    """
    if name in import_module(package).__all__:
        for module in map(import_module, (f"{package}.{each}" for each in modules_of(package))):
            found = vars(module).get(name)
            if getattr(found, "__module__", None) == module.__name__:
                return found
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
