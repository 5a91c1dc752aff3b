import runpy
import sys

import pytest


def test_python_m_recurra_is_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recurra", "train", "nowhere.yaml"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recurra", run_name="__main__")
    assert ended.value.code == 2
    assert (
        "recurra train: recipe is nowhere.yaml, which is neither a file nor the name of a recipe"
        in capsys.readouterr().err
    )


def test_importing_it_runs_nothing():
    runpy.run_module("recurra.__main__", run_name="recurra.__main__")
