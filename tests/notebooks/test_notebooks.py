"""The notebooks run from the first cell to the last, at the smallest sizes, in this process.

A cell with sizes has others for this test in its metadata, under `smallest`.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
NEEDS = {"06-a-converted-mamba": "transformers"}


@pytest.fixture
def unseen_figures():
    before, threads = matplotlib.get_backend(), torch.get_num_threads()
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("unseen_figures")
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    needed = NEEDS.get(path.stem)
    if needed and not find_spec(needed):
        pytest.skip(f"needs the package {needed}")
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            source = cell["metadata"].get("smallest", "".join(cell["source"]))
            exec(compile(source, f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert cells[0]["source"][0].startswith("# ")
