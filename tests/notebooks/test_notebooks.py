"""The notebooks run from the first cell to the last, at the smallest sizes.

A cell with sizes has others for this test in its metadata, under `smallest`.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks: pip install recurra[notebooks]")
nbclient = pytest.importorskip("nbclient", reason="needs the extra notebooks: pip install recurra[notebooks]")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LONGEST = 600  # seconds of a cell on a busy machine
NEEDS = {"06-a-converted-mamba": "transformers"}
QUIET = {"OMP_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "JUPYTER_PLATFORM_DIRS": "1"}


def test_there_are_six():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    needed = NEEDS.get(path.stem)
    if needed and not find_spec(needed):
        pytest.skip(f"needs the package {needed}")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.metadata.get("smallest", cell.source)
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=LONGEST, kernel_name="python3", resources=place)
    client.execute(env=dict(os.environ))
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.cells[0].source.startswith("# ")
