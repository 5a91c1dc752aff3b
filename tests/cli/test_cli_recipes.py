"""`recurra recipes`: the names, and the text of one."""

from recurra.cli import main
from recurra.train.recipe import find_recipe, recipe_names


def test_all_recipes_are_listed_with_their_variants(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())
    assert next(line for line in out.splitlines() if "ptb/transformers " in line).split("│")[2].strip() == "36"


def test_one_recipe_is_printed_as_it_is(capsys):
    assert main(["recipes", "demo/fixed"]) == 0
    assert capsys.readouterr().out == find_recipe("demo/fixed").read_text(encoding="utf-8")
