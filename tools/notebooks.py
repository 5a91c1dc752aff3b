"""Run notebooks from the first cell to the last, and keep what they print and draw.

    python -m tools.notebooks                          # all of them, about ten minutes on one core
    python -m tools.notebooks notebooks/02-scans.ipynb

Run it when a notebook or what it shows has changed. It needs the extra `notebooks`.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def run(path: Path) -> None:
    """Run a notebook in its folder, and write it with its outputs; what libraries warned of on this machine goes."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=3600, coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for one in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        print(one, flush=True)
        run(one)
