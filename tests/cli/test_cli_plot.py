"""`recurra plot`: figures of runs."""

from pathlib import Path

from recurra.cli import main


def test_plot_draws_every_figure_as_png_and_svg(capsys, trained):
    assert main(["plot", trained]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = {"gate-magnitudes", "gate-phases", "magnitude-activations", "curves", "accuracy-by-span"}
    assert {path.name for path in files} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.stat().st_size > 1000 and path.parent == Path(trained) / "figures" for path in files)
