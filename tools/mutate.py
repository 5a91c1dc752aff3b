"""Mutation testing: break one place of the code at a time, and see whether the tests of its folder notice.

`python -m tools.mutate --mutants 40 --seed 0` works in a copy of the tree. A mutant is killed when a test fails
with it that passes without it, or when tests hang with it that end in time without it.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("ops", "mixers", "train", "serve")
LIMIT = 300  # seconds for the tests of one mutant
_SWAPPED: dict[type, Any] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_MESSAGES = ("print", "sentence", "kind_of", "warn", "warning", "info", "debug", "suppress", "TypeVar")
_SHARED = {"mixers": "contracts", "ops": "ops/toolkit"}
_PREFETCHES = ("prefetch", "_fetch")  # which change no result


def _tests(path: Path) -> tuple[str, ...]:
    """Name the module's own tests, those that name it, those of its folder, and those that mixers or ops share."""
    inner = path.relative_to(ROOT / "src/recurra")
    folder = ROOT / "tests" / str(inner.parent).replace("/_", "/")
    shared = ROOT / "tests" / _SHARED.get(inner.parts[0], "")
    found = [*sorted(folder.glob(f"test_{path.stem.lstrip('_')}*.py")), *_naming(path), folder, shared]
    return tuple(str(one.relative_to(ROOT)) for one in found if one.exists() and one != ROOT / "tests")


def _naming(path: Path) -> list[Path]:
    """Find the files of tests that name a module or one of its public classes, themselves or in a program they run."""
    module = "recurra." + ".".join(path.relative_to(ROOT / "src/recurra").with_suffix("").parts)
    classes = [node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("*.py"))}
    words = [module, *(name for name in classes if not name.startswith("_"))]
    naming = [file for file, text in texts.items() if any(word in text for word in words)]
    programs = [file.stem for file in naming if file.stem.endswith("_worker")]
    naming += [file for file, text in texts.items() if any(program in text for program in programs)]
    return [file for file in dict.fromkeys(naming) if file.name.startswith("test_")]


def _nodes(node: ast.AST, in_function: bool = False) -> Iterator[ast.AST]:
    """Give the nodes inside functions, without annotations, messages and Triton's code."""
    for child in ast.iter_child_nodes(node):
        called = getattr(child.value if isinstance(child, ast.Expr) else child, "func", None)
        is_message = getattr(called, "attr", getattr(called, "id", "")) in _MESSAGES + _PREFETCHES
        is_signature = isinstance(node, (ast.FunctionDef, ast.AnnAssign)) and not isinstance(child, ast.stmt)
        is_triton = any("triton" in ast.unparse(one) for one in getattr(child, "decorator_list", ()))
        if not (is_message or is_signature or is_triton or isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr))):
            if in_function:
                yield child
            yield from _nodes(child, in_function or isinstance(child, ast.FunctionDef))


def _changed(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _SWAPPED:
            yield f"({ast.unparse(ast.BinOp(left, _SWAPPED[type(op)](), right))})"
        case ast.Compare(left, [op], others) if type(op) in _SWAPPED:
            yield f"({ast.unparse(ast.Compare(left, [_SWAPPED[type(op)]()], others))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value) | float(value)):
            yield str(value + 1)
        case ast.Expr(ast.Call()):
            yield from ("pass", "return")
        case ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "pass"


def _mutants(package: str) -> Iterator[tuple[Path, int, int, str]]:
    """Give replacements in files, each between two offsets in bytes."""
    for path in sorted((ROOT / "src/recurra" / package).rglob("*.py")):
        source, starts = path.read_bytes(), [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in _nodes(ast.parse(source)) if "triton" not in path.name else ():
            for text in _changed(node):
                first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]  # type: ignore[attr-defined]
                yield path, first + node.col_offset, last + node.end_col_offset, text  # type: ignore[attr-defined]


def _run(tests: tuple[str, ...], tree: Path) -> tuple[str, tuple[str, ...]]:
    """Run tests in a copy of the tree up to the first that fails: "green", "red" or "late", and which failed."""
    cache = tree.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    options = f"-x -q -n 0 -p no:randomly -o cache_dir={cache}".split()
    given = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with subprocess.Popen(command, cwd=tree, env=given, stdout=-3, stderr=-3, start_new_session=True) as process:
        try:
            ended = "red" if process.wait(LIMIT) else "green"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "late", tests
    failed = cache / "v/cache/lastfailed"
    return ended, tuple(json.loads(failed.read_text())) if failed.exists() else tests


def main() -> None:
    """Draw as many mutants of each package, and print each with its verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--mutants", 40), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    draw, verdicts = random.Random(given.seed), []
    each = [draw.sample([*_mutants(package)], given.mutants) for package in PACKAGES]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(ROOT, Path(folder, "tree"), ignore=shutil.ignore_patterns(".*", "node_modules")))
        for path, start, end, text in [mutant for turn in zip(*each, strict=True) for mutant in turn][: given.mutants]:
            source, copy = path.read_bytes(), tree / path.relative_to(ROOT)
            copy.write_bytes(source[:start] + text.encode() + source[end:])
            after, failed = _run(_tests(path), tree)
            shutil.rmtree(copy.parent)  # with the kernels compiled from the mutant
            shutil.copytree(path.parent, copy.parent)
            is_noticed = after != "green" and _run(failed, tree)[0] == "green"
            verdict = "killed" if is_noticed else f"SURVIVED ({after})"
            line, old = source[:start].count(b"\n") + 1, source[start:end].decode()
            print(f"{verdict}: {path.relative_to(ROOT)}:{line}\n  - {old}\n  + {text}", flush=True)
            verdicts.append(verdict)
    print(*(f"{verdicts.count(one)} {one}" for one in sorted({*verdicts})), sep=", ")


if __name__ == "__main__":
    main()
