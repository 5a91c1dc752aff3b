"""Starting runs from Python."""

from pathlib import Path

from recurra.runs.start import default_run_folder


def test_the_default_folder_tells_recipes_of_one_name_apart():
    assert default_run_folder("recipes/ptb/gateloop.yaml") == Path("runs/ptb-gateloop")
    assert default_run_folder("recipes/ptb/transformers.yaml#crt-gru") == Path("runs/ptb-crt-gru")
