"""`python -m tools.pages benchmarks`: measure time and memory over L, draw, and build docs/benchmarks.md.

python -m tools.pages benchmarks               # measure (about 20 minutes), draw, build; on an otherwise idle machine
python -m tools.pages benchmarks --resume      # continue an interrupted measurement
python -m tools.pages benchmarks --draw-only   # build the page again from docs/figures/benchmarks.json
"""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recurra.training.allocator import keep_large_blocks
from tools.pages.benchmarks import record
from tools.pages.benchmarks.limits import Limits
from tools.pages.benchmarks.measure import Say, measure, n_points
from tools.pages.benchmarks.page import BenchmarksPage
from tools.pages.benchmarks.sweeps import SWEEPS

ROOT = Path(__file__).parents[3]
RECORD = Path("figures") / "benchmarks.json"
"""Where the folder of documentation keeps the record."""


def run(words: Sequence[str]) -> list[Path]:
    """Measure unless told not to, build the page, and return the paths of its files.

    Raises:
        KeyboardInterrupt: after Ctrl-C, saying how to continue.
    """
    arguments = _parser().parse_args(words)
    docs: Path = arguments.docs
    if not arguments.draw_only:
        try:
            _measure(arguments, Console(stderr=True))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the points so far are in {arguments.kept}; continue with --resume") from None
    return BenchmarksPage(docs / "benchmarks", record.load(docs / RECORD)).write()


def _measure(arguments: Namespace, console: Console) -> None:
    torch.set_num_threads(arguments.threads)
    keep_large_blocks()
    # XLA takes seconds to compile a length; the processes that measure memory leave it to the one that measures time.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(arguments.kept.parent.resolve() / "jax-cache"))
    lengths = [2**power for power in range(arguments.shortest, arguments.longest + 1)]
    if not lengths:
        raise ValueError(f"--longest is {arguments.longest}; expected at least --shortest, {arguments.shortest}")
    limits = Limits(arguments.seconds, arguments.gigabytes)
    found = record.new(lengths, limits, arguments.budget, _command(arguments))
    if arguments.resume:
        found = record.resume(arguments.kept, found)
    with _progress(n_points(found, arguments.only), console) as say:
        measure(found, arguments.only, lambda: record.save(found, arguments.kept), say)
    record.save(found, arguments.docs / RECORD)


def _command(arguments: Namespace) -> str:
    """Write the command that repeats a measurement: every option about it that differs from the default."""
    parts, parser = ["python -m tools.pages benchmarks"], _parser()
    for name in ("only", "threads", "shortest", "longest", "seconds", "gigabytes", "budget"):
        value = getattr(arguments, name)
        if value != parser.get_default(name):
            parts.append(f"--{name} {' '.join(value) if isinstance(value, list) else value}")
    return " ".join(parts)


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Say]:
    """Show a bar on a terminal, and elsewhere a line for each thing that is measured."""
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


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m tools.pages benchmarks", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue the measurement in --kept")
    how.add_argument("--draw-only", action="store_true", help="measure nothing")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS), help="some sweeps (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and the kernels (default: 2)")
    parser.add_argument("--shortest", type=int, default=7, help="log2 of the smallest L (default: 7)")
    parser.add_argument("--longest", type=int, default=20, help="log2 of the largest L (default: 20)")
    parser.add_argument("--seconds", type=float, default=2.0, help="end a curve before longer calls (default: 2)")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="or before calls of more memory (default: 6)")
    parser.add_argument("--budget", type=float, default=0.4, help="about the seconds to time a point (default: 0.4)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of documentation (default: docs)")
    parser.add_argument(
        "--kept", type=Path, default=ROOT / "runs" / "benchmarks-page.json", help="file for the points so far"
    )
    return parser
