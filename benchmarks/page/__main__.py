"""Measure time and memory over L and write docs/benchmarks.md with its figures, all from one JSON file.

python -m benchmarks.page               # measure (some 20 minutes), draw, write; on an otherwise idle machine
python -m benchmarks.page --resume      # go on with a measurement that was interrupted
python -m benchmarks.page --draw-only   # the page again from docs/figures/benchmarks.json
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.page import draw, record, text
from benchmarks.page.limits import Limits
from benchmarks.page.measure import Say, measure, n_points
from benchmarks.page.sweeps import SWEEPS
from recurra.training.allocator import keep_large_blocks

_ROOT = Path(__file__).parents[2]
_JSON = Path("figures") / "benchmarks.json"


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; 130 after Ctrl-C, 1 where something did not fit."""
    arguments = _parser().parse_args(given)
    console = Console(stderr=True)
    try:
        if not arguments.draw_only:
            _measure(arguments, console)
        _write(arguments.docs)
    except KeyboardInterrupt:
        _note(console, f"Stopped. What was measured is in {arguments.kept}; --resume goes on from there.")
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        _note(console, f"error: {error}")
        return 1
    _note(console, f"written: {arguments.docs / 'benchmarks.md'}")
    return 0


def _measure(arguments: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    # XLA takes seconds to compile a length; the processes that measure memory leave it for the one that measures time.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(arguments.kept.parent.resolve() / "jax-cache"))
    lengths = [2**power for power in range(arguments.shortest, arguments.longest + 1)]
    if not lengths:
        raise ValueError(f"--shortest is {arguments.shortest} and --longest {arguments.longest}; there is no length")
    limits = Limits(arguments.seconds, arguments.gigabytes)
    found = record.new(lengths, limits, arguments.budget, _command(arguments))
    if arguments.resume:
        found = record.resume(arguments.kept, found)
    with _progress(n_points(found, arguments.only), console) as say:
        measure(found, arguments.only, lambda: record.save(found, arguments.kept), say)
    record.save(found, arguments.docs / _JSON)


def _command(arguments: argparse.Namespace) -> str:
    """What to type for the same measurement: the options about it that are not the default ones."""
    parts, parser = ["python -m benchmarks.page"], _parser()
    for name in ("only", "threads", "shortest", "longest", "seconds", "gigabytes", "budget"):
        value = getattr(arguments, name)
        if value != parser.get_default(name):
            parts.append(f"--{name} {' '.join(value) if isinstance(value, list) else value}")
    return " ".join(parts)


def _write(docs: Path) -> None:
    found = record.load(docs / _JSON)
    figures = draw.write(found, docs / _JSON.parent)
    (docs / "benchmarks.md").write_text(text.page(found, figures))


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Say]:
    """A bar on a terminal, a line for each thing that is measured elsewhere."""
    if not console.is_terminal:
        yield lambda what, done: _note(console, what) if what and not done else None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=total)

        def say(what: str, done: int) -> None:
            progress.update(task, advance=done)
            if what:
                progress.update(task, description=what)

        yield say


def _note(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on with what --kept holds")
    how.add_argument("--draw-only", action="store_true", help="measure nothing")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS), help="some sweeps (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="threads for torch and the kernels (default: 2)")
    parser.add_argument("--shortest", type=int, default=7, help="log2 of the least L (default: 7)")
    parser.add_argument("--longest", type=int, default=20, help="log2 of the largest L (default: 20)")
    parser.add_argument("--seconds", type=float, default=2.0, help="a curve ends before longer calls (default: 2)")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="or before calls of more memory (default: 6)")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds to time one point, about (default: 0.4)")
    parser.add_argument("--docs", type=Path, default=_ROOT / "docs", help="where page and figures go (default: docs)")
    parser.add_argument("--kept", type=Path, default=_ROOT / "runs" / "benchmarks-page.json", help="while measuring")
    return parser


if __name__ == "__main__":
    sys.exit(main())
