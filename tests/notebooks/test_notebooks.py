"""The notebooks run from the first cell to the last, at the smallest sizes, in this process.

A cell with sizes has others for this test in its metadata, under `smallest`.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
NEEDS = {"06-a-converted-mamba": "transformers"}


@pytest.fixture
def unseen_figures(set_threads):
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(before)


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
            source = source.removeprefix("%matplotlib inline\n")
            exec(compile(source, f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_what_a_whole_run_gave(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    assert notebook["cells"][0]["source"][0].startswith("# ")
