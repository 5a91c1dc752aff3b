"""The folder that a page's figures go into."""

from pathlib import Path

from matplotlib.figure import Figure

from recurra.analysis.plots import save_png

DOTS_PER_INCH = 150
"""For a page in a browser; print has the figures that `recurra plot` draws."""


class Figures:
    """Draws a page's figures as PNG files, and gives the Markdown that shows them.

    Args:
        folder: where the files go, figures/ beside the page; None draws nothing, and the Markdown is the same.
        dots_per_inch: the resolution.
    """

    def __init__(self, folder: Path | None, *, dots_per_inch: int = DOTS_PER_INCH) -> None:
        self.folder, self.dots_per_inch = folder, dots_per_inch
        self.written: list[Path] = []

    def show(self, figure: Figure, name: str, title: str) -> str:
        """Draw FOLDER/NAME.png, and return the line that shows it."""
        if self.folder is not None:
            self.written.append(save_png(figure, self.folder, name, dots_per_inch=self.dots_per_inch))
        return f"![{title}](figures/{name}.png)"
