"""Packages that import a name when it is first asked for, from the module that their stub, `__init__.pyi`, names."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package whose stub lists what it exports.

    Type checkers and editors read the same stub.
    """
    statements = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    homes = {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        return import_module(f"{package}.{name}") if module == package else getattr(import_module(module), attribute)

    return load, lambda: sorted(homes), sorted(homes)
