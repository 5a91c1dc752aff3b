"""The size of the house in numbers: files, imports, public names, and what two typical uses load.

python -m tools.house
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
USES = {
    'create_mixer("gateloop", 64) and a forward pass': (
        "import torch, recurra; recurra.create_mixer('gateloop', 64)(torch.zeros(1, 2, 64))"
    ),
    "from recurra.train import Trainer": "from recurra.train import Trainer",
}
_LOADED = "\nimport sys; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('recurra') and m.__file__))"


def code_lines(text: str) -> int:
    """Count the lines that are neither empty nor a comment."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def import_lines(tree: ast.Module) -> int:
    """Count the lines of all import statements."""
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def public_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """Give the top-level functions and classes without an underscore, outside private modules and packages."""
    parts = path.relative_to(SOURCE / "recurra").with_suffix("").parts
    if not any(part.startswith("_") and part != "__init__" for part in parts):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        yield from (node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))


def loaded_by(program: str) -> list[Path]:
    """List our files that a program loads in a new process."""
    command = [sys.executable, "-W", "ignore", "-c", program + _LOADED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SOURCE).stdout
    return [Path(name) for name in printed.splitlines()[-1].split()]


def measures() -> Iterator[tuple[str, str]]:
    """Give each measure and its value."""
    files = sorted((SOURCE / "recurra").rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    code, total = sum(map(code_lines, texts.values())), sum(lines.values())
    names = sum(len(list(public_names(path, tree))) for path, tree in trees.items())
    imports = sum(map(import_lines, trees.values()))
    yield "files", f"{len(files)}"
    yield "lines", f"{total:,} ({total / len(files):.0f} a file)"
    yield "import lines, share of code", f"{imports / code:.1%} of {code:,}"
    yield "public top-level names", f"{names} ({1000 * names / code:.0f} per 1,000 lines of code)"
    for use, program in USES.items():
        loaded = loaded_by(program)
        yield use, f"{len(loaded)} modules, {sum(lines[path] for path in loaded):,} lines"


def main() -> None:
    """Print the table."""
    rows = list(measures())
    width = max(len(name) for name, _ in rows)
    print(*(f"{name:{width}}  {value}" for name, value in rows), sep="\n")


if __name__ == "__main__":
    main()
