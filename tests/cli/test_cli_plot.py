"""`recurra plot`: figures of runs."""

from pathlib import Path

import pytest

from recurra.cli import main


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
