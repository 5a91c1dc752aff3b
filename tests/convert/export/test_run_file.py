"""The program beside an exported file."""

import runpy
import sys

import pytest

pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")

from recurra.convert.export import run_file


@pytest.mark.parametrize("words", [[], ["one", "two"], [""]])
def test_without_a_text_it_prints_its_usage(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["model.py", *words])
    with pytest.raises(SystemExit, match=r'^usage: python .*run_file.py "the text so far"$'):
        runpy.run_path(run_file.__file__, run_name="__main__")
