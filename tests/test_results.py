"""Results beside the recipes: small files without places of a machine, and figures that a page shows."""

import json
import re
import runpy
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
RESULTS = sorted(ROOT.glob("recipes/*/results.json"))
PLOTS = sorted([*ROOT.glob("recipes/*/plot.py"), ROOT / "benchmarks" / "plot.py"])


def name_of(path: Path) -> str:
    return path.parent.name


def test_every_experiment_says_what_came_of_it():
    folders = {path.parent for path in ROOT.glob("recipes/*/*.yaml")}
    files = ("README.md", "results.json")
    assert [folder / name for folder in folders for name in files if not (folder / name).is_file()] == []


@pytest.mark.parametrize("path", RESULTS, ids=name_of)
def test_results_are_small_and_name_no_place_on_a_machine(path):
    text = path.read_text()
    assert len(text) < 60_000
    assert not re.search(r'"(/|\.\.|~)|/(home|root|tmp)/', text)
    for curve in json.loads(text).get("curves", {}).values():
        assert len({len(column) for column in curve.values()}) == 1
        assert len(next(iter(curve.values()))) <= 100


@pytest.mark.parametrize("path", RESULTS, ids=name_of)
def test_every_run_says_how_it_was_trained(path):
    for name, run in json.loads(path.read_text()).get("runs", {}).items():
        assert "recurra " in run["command"], name
        assert {"seed"} <= run.keys(), name


@pytest.mark.parametrize("path", PLOTS, ids=name_of)
def test_a_script_draws_figures_that_are_there(path, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(path), str(tmp_path)])
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: Path(file).touch())
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        matplotlib.pyplot.close("all")
        matplotlib.use(before)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn
    assert drawn <= {file.name for file in FIGURES.iterdir()}


def test_every_figure_is_shown_by_a_page():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/README.md")]
    shown = {name for page in pages for name in re.findall(r"figures/([\w-]+\.png)", page.read_text(encoding="utf-8"))}
    assert {file.name for file in FIGURES.iterdir()} == shown - {"gate-magnitudes.png"}
