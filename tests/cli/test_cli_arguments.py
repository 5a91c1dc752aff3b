"""Which words of a command line are a command's own."""

from recurra.cli.arguments import split_overrides


def test_overrides_are_told_from_a_commands_own_words():
    words = ["--run", "a", "--data.path", "--odd", "recipe.yaml", "--model.d_model=3", "--optimizer", "x.yaml", "-h"]
    assert split_overrides(words) == (
        ["--run", "a", "recipe.yaml", "-h"],
        ["--data.path", "--odd", "--model.d_model=3", "--optimizer", "x.yaml"],
    )
