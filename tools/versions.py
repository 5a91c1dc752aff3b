"""One version everywhere: what must be equal before a release.

python -m tools.versions 0.1.0
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/recurra/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "packaging/conda/meta.yaml": r'^{% set version = "(.+)" %}$',
    "CHANGELOG.md": r"^## \[(.+?)\]",
}
"""Files, and the pattern of the version in each; the changelog's is its newest section."""


def versions() -> Iterator[tuple[str, str]]:
    """Give each file with the version in it.

    Raises:
        ValueError: a file has none.
    """
    for name, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        if match is None:
            raise ValueError(f"{name} has no version; expected a line that fits {pattern}")
        yield name, match[1]


def main() -> None:
    """Compare all with the version on the command line."""
    wrong = [f"{name} has {found}" for name, found in versions() if found != sys.argv[1]]
    if wrong:
        sys.exit(f"the tag is {sys.argv[1]}, but {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
