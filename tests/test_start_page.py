"""The start page, executed: every command and every piece of Python, in order, in one empty folder.

Only installing is left out (`python -m tools.try_wheel` does it in clean environments), and trainings are cut short.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.small_figures import unrendered_figures  # noqa: F401
from tools.start_page import Step, steps

from recurra.cli import main

STEPS = steps()
SHORT = {
    "demo/data-controlled": ["--training.max_steps", "2", "--data.n_samples", "60"],
    "text": ["--training.max_steps", "2", "--model.d_model", "16", "--model.n_layer", "1"],
}
"""What cuts the page's trainings short, beside settings that spare the machine."""
QUIET = ["--training.tensorboard", "false", "--training.threads", "1", "--training.accelerator", "cpu"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, set_threads) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def do(step: Step, names: dict[str, object]) -> None:
    if step.python:
        exec(compile(step.python, "docs/start.md", "exec"), names)
    elif step.program == "recurra":
        words = list(step.words[1:])
        short = [*SHORT[words[1]], *QUIET] if words[0] == "train" else []
        assert main([*words, *short]) == 0, " ".join(step.words)
    else:
        assert step.program == "python", step.words
        subprocess.run([sys.executable, *step.words[1:]], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="needs the extra export: pip install recurra[export]")
@pytest.mark.usefixtures("unrendered_figures")
def test_every_step_of_the_start_page_works(empty_folder, capfd):
    names: dict[str, object] = {}
    done = [step for step in STEPS if not step.installs]
    for step in done:
        do(step, names)
    assert {step.words[1] for step in done if step.program == "recurra"} >= {"info", "train", "eval", "export"}
    assert len(names) > 1
    assert (empty_folder / "python.onnx").is_file()


def test_the_page_begins_with_an_installation():
    assert [step.program for step in STEPS[:2]] == ["python", "pip"]
    assert sum(step.installs for step in STEPS) == 3
