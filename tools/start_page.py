"""The steps of the site's start page, in order: its commands and its pieces of Python."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "start.md"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Step(NamedTuple):
    """What a reader does: a piece of Python, or a command as its words."""

    python: str = ""
    words: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The program of a command by its last name, such as pip; "" for a piece of Python."""
        return Path(self.words[0]).name if self.words else ""

    @property
    def installs(self) -> bool:
        """Whether the command changes the environment."""
        return self.program == "pip" or self.words[:3] == ("python", "-m", "venv")


def steps(page: Path = PAGE) -> list[Step]:
    """Read the steps of a page: one per fenced piece of Python, and one per line of every other fence."""
    found = []
    for language, text in _FENCED.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            found.append(Step(python=text))
        else:
            found += [Step(words=tuple(shlex.split(line, comments=True))) for line in text.splitlines() if line]
    return found
