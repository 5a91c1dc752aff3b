"""`recurra eval`, `plot` and `demo`: what finished runs are scored and drawn as, and two that are compared."""

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import RECIPE, measured

from recurra.cli import demo, main


def test_eval_prints_and_writes_the_scores(capsys, trained):
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last"]) == 0
    assert "accuracy" in capsys.readouterr().out
    written = json.loads((Path(trained) / "eval-valid.json").read_text())
    assert written["step"] == 12
    assert written["loss"] == float(measured(Path(trained))[-1]["valid_loss"])
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last", "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert {key: printed[key] for key in ("step", "loss", "accuracy")}.items() <= written.items()


def test_a_temperature_is_given_or_chosen_on_the_validation_split(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    assert main(["eval", str(folder), "--split", "valid"]) == 0
    assert main(["eval", str(folder), "--split", "valid", "--temperature", "0.5"]) == 0
    plain, given = (json.loads((folder / f"eval-valid{name}.json").read_text()) for name in ("", "-temperature-0.5"))
    assert (plain["changes"], given["changes"]) == ({}, {"temperature": 0.5})
    assert main(["eval", str(folder), "--split", "valid", "--temperature", "valid"]) == 0
    (path,) = {*folder.glob("eval-valid-temperature-*")} - {folder / "eval-valid-temperature-0.5.json"}
    assert json.loads(path.read_text())["loss"] <= min(plain["loss"], given["loss"])


def test_plot_draws_every_figure_as_png_and_svg(capsys, trained):
    assert main(["plot", trained]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = {"gate-magnitudes", "gate-phases", "magnitude-activations", "curves", "accuracy-by-span"}
    assert {path.name for path in files} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.stat().st_size > 1000 and path.parent == Path(trained) / "figures" for path in files)


@pytest.mark.usefixtures("unrendered_figures")
def test_only_the_gates_of_gateloop_have_its_activations(capsys, recipe, tmp_path):
    run = tmp_path / "gru"
    words = ["--model.mixer=gru", "--model.mixer_options={}", "--training.max_steps=1"]
    assert main(["train", recipe, "--run-dir", str(run), *words]) == 0
    capsys.readouterr()
    assert main(["plot", str(run), "--out", str(tmp_path / "all")]) == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert names == {"gate-magnitudes", "gate-phases", "curves", "accuracy-by-span"}


@pytest.mark.usefixtures("unrendered_figures")  # `recurra plot` renders the same ones
def test_demo_compares_both_models_and_continues_where_it_was_stopped(capsys, monkeypatch, tmp_path):
    recipes, out = tmp_path / "recipes", tmp_path / "out"
    (recipes / "demo").mkdir(parents=True)
    for name, transition in (("data-controlled", "data"), ("fixed", "fixed")):
        text = RECIPE.replace("transition: data", f"transition: {transition}").replace("n_layer: 2", "n_layer: 1")
        (recipes / "demo" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(demo, "recipes_folder", lambda: recipes)
    assert main(["demo", "--run-dir", str(out)]) == 0
    text = capsys.readouterr().out
    assert "data-controlled transition" in text
    assert "Test accuracy" in text
    assert text.rstrip().endswith(f"recurra explore {out}/data-controlled {out}/fixed")
    assert (out / "figures" / "accuracy-by-span.svg").is_file()
    assert (out / "fixed" / "figures" / "gate-magnitudes.png").is_file()
    before = measured(out / "fixed")
    monkeypatch.setattr(demo, "draw_comparison", lambda *given: [])
    monkeypatch.setattr(demo, "draw_gates", lambda *given: [])
    assert main(["demo", "--run-dir", str(out)]) == 0
    assert "continued in" in capsys.readouterr().out
    assert measured(out / "fixed") == before
