"""`recurra demo`: two small models, compared."""

import pytest
from tests.cli.conftest import RECIPE, measured

from recurra.cli import demo, main


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
