"""`python -m tools.pages PAGE`: build a page of documentation, after adding runs or measuring if asked to."""

import sys
from collections.abc import Sequence
from importlib import import_module

PAGES = {
    "results": ("tools.pages.results.command", "docs/results.md, from summaries of runs"),
    "benchmarks": ("tools.pages.benchmarks.command", "docs/benchmarks.md, from a measurement over sequence lengths"),
}
FAILED = 2
INTERRUPTED = 130


def main(words: Sequence[str] | None = None) -> int:
    """Build a page and return the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if words is None else words)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else FAILED
    if given[0] not in PAGES:
        print(f"tools.pages: unknown page {given[0]!r}\n\n{usage()}", file=sys.stderr)
        return FAILED
    try:
        for path in import_module(PAGES[given[0]][0]).run(given[1:]):
            print(path)
    except KeyboardInterrupt as interrupt:
        print(f"tools.pages {given[0]}: interrupted{'; ' if interrupt.args else ''}{interrupt}", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:
        print(f"tools.pages {given[0]}: {error}", file=sys.stderr)
        return FAILED
    return 0


def usage() -> str:
    """List the pages, one per line."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in PAGES.items()]
    return "\n".join(["usage: python -m tools.pages PAGE [ARGUMENTS]", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
