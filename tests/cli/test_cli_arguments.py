"""The arguments of commands, which are read without what the commands themselves need."""

from dataclasses import fields

import pytest
from tests.processes import in_new_interpreter

from recurra._choices import PUBLISHED_CLASSES, RECIPE_KEYS, VOCABULARY_KINDS
from recurra.cli import main
from recurra.cli._arguments import split_overrides
from recurra.convert.published.folder import ARCHITECTURES
from recurra.data.corpus import ENCODERS
from recurra.train.experiment import Experiment


def test_overrides_are_told_from_a_commands_own_words():
    words = [
        "--run-dir",
        "a",
        "--data.path",
        "--odd",
        "recipe.yaml",
        "--model.d_model=3",
        "--optimizer",
        "x.yaml",
        "-h",
    ]
    assert split_overrides(words) == (
        ["--run-dir", "a", "recipe.yaml", "-h"],
        ["--data.path", "--odd", "--model.d_model=3", "--optimizer", "x.yaml"],
    )


def test_help_and_mistakes_of_every_command_load_nothing_heavy():
    program = """
    import sys
    from recurra.cli import COMMANDS, main
    for words in [[name] for name in COMMANDS] + [["export", to] for to in ("hf", "gguf", "onnx", "web")]:
        for word, code in (("--help", 0), ("--there-is-none", 2)):
            try:
                main([*words, word])
            except SystemExit as ended:
                assert ended.code == code, words
            else:
                raise AssertionError(words)
    print(sorted(sys.modules.keys() & {"torch", "numpy", "rich", "yaml", "jsonargparse", "fastapi"}))
    """
    printed = in_new_interpreter(program)
    assert "usage: recurra gradients" in printed
    assert "\n[]\n" in printed


def test_the_choices_are_those_of_the_library():
    assert list(RECIPE_KEYS) == [field.name for field in fields(Experiment)]
    assert list(PUBLISHED_CLASSES) == list(ARCHITECTURES)
    assert list(VOCABULARY_KINDS) == list(ENCODERS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "text", "--run", "there"], "unrecognized arguments: --run there: did you mean --run-dir?"),
        (["eval", "run", "--splt=test"], "unrecognized arguments: --splt=test: did you mean --split?"),
        (["eval", "run", "--wholly-else"], "unrecognized arguments: --wholly-else\n"),
        (["train", "text", "--steps", "20"], "unrecognized arguments: --steps 20\n"),
        (["eval", "run", "other"], "unrecognized arguments: other\n"),
        (["compare", "text", "--equal", "flops", "--mixers", "gru", "--model.d_model", "16"], "omit --model.d_model\n"),
    ],
)
def test_an_unknown_option_is_answered_with_a_near_one(capsys, words, said):
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err
