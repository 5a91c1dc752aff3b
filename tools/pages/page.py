"""A page of documentation: its sections in order, Markdown with Jinja expressions for numbers, tables and figures."""

import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

from recurra.checks import sentence
from recurra.files.writing import replacing
from tools.pages import markdown
from tools.pages.figures import Figures

SECTION = "*.md.jinja"


class PageError(ValueError):
    """A section that cannot be rendered; the message names its file and line."""


class Page:
    """A page whose sections are in FOLDER/sections/NN-title.md.jinja.

    Args:
        folder: the page is beside it, FOLDER.md.
        command: what builds the page, for the note at its top.
        figures: what draws the page's figures.
        functions: what sections may call, by name.
        values: what sections may read, by name.

    Raises:
        FileNotFoundError: there are no sections.
    """

    def __init__(
        self,
        folder: Path,
        *,
        command: str,
        figures: Figures,
        functions: Mapping[str, Callable[..., Any]],
        values: Mapping[str, Any] = {},
    ) -> None:
        self.folder, self.command, self.figures, self.functions = folder, command, figures, functions
        self.file = folder.with_name(folder.name + ".md")
        self.sections = sorted((folder / "sections").glob(SECTION))
        if not self.sections:
            came = f"{folder}, which has no sections/{SECTION}"
            raise FileNotFoundError(sentence("folder", came, "the folder of a page"))
        loader = FileSystemLoader(folder / "sections")
        self._environment = SandboxedEnvironment(
            loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
        )
        self._environment.filters |= {"show": markdown.show, "paragraph": markdown.paragraph, "item": markdown.item}
        self._environment.globals |= {**values, **functions}

    def render(self) -> str:
        """Return the text of the page, and draw its figures.

        Raises:
            PageError: a section has a mistake.
        """
        place = "/".join(self.folder.absolute().parts[-2:])
        note = f"<!-- Built by `{self.command}` from {place}/: change the sections there, not this page. -->"
        # Omitted parts of a template leave blank lines behind.
        texts = [re.sub(r"\n{3,}", "\n\n", self._rendered(section)).strip("\n") for section in self.sections]
        return note + "\n" + "\n\n".join(text for text in texts if text) + "\n"

    def write(self) -> list[Path]:
        """Write the page and its figures, and return their paths.

        Raises:
            PageError: a section has a mistake; the page is then left as it was.
        """
        text = self.render()
        with replacing(self.file) as file:
            file.write(text.encode())
        return [*self.figures.written, self.file]

    def _rendered(self, section: Path) -> str:
        try:
            return self._environment.get_template(section.name).render()
        except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise PageError(f"{section}, line {_line(error, section.name)}: {error}") from error


def _line(error: BaseException, section: str) -> int | str:
    """Find the line of a section that raised an error: Jinja puts the lines of its templates into tracebacks."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == section
    ]
    return lines[-1] if lines and lines[-1] is not None else "?"
