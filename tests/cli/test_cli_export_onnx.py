"""`recurra export onnx`: a run's folder in, a file out that runs without this package."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.conftest import train_on_text

pytest.importorskip("onnx", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxscript", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("transformers", reason="needs the extra export: pip install recurra[export]")

import onnx

from recurra import open_run
from recurra.cli import main
from recurra.convert.export import onnx_file
from recurra.convert.export.onnx_file import OnnxModel, largest_difference, to_onnx

pytestmark = pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse

PROMPT = "the dog saw\n a naïve cat ran away"
RUNS = {
    "words": ("text", "vocabulary: words", "{n_layer: 1, d_model: 8, mixer: gru, mixer_options: {}}"),
    "crt": ("text-crt", "vocabulary: words", "{n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Finished runs by name, and the exported files of one of them, whose graph is traced once for both forms."""
    folder = tmp_path_factory.mktemp("runs")
    for name, run in RUNS.items():
        train_on_text(folder, name, *run)
    said, traced = io.StringIO(), []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(onnx_file, "to_onnx", lambda *given, **more: traced.append(to_onnx(*given, **more)) or traced[0])
        assert main(["export", "onnx", str(folder / "words"), str(folder / "words.onnx")]) == 0
        patch.setattr(onnx_file, "to_onnx", lambda *_, **__: traced[0])
        (folder / "int8.py").write_text("mine")
        assert main(["export", "onnx", str(folder / "words"), str(folder / "int8.onnx"), "--int8", "--force"]) == 0
    (folder / "said").write_text(said.getvalue())
    return folder


def greedy(run: Path, n_tokens: int) -> str:
    """What the model itself goes on with."""
    trained = open_run(run)
    tokens = torch.from_numpy(trained.tokenizer.encode(PROMPT))[None]
    with torch.no_grad():
        for _ in range(n_tokens):
            tokens = torch.cat([tokens, trained.model(tokens)[0][:, -1:].argmax(-1)], 1)
    return trained.tokenizer.decode(tokens[0, -n_tokens:])


def test_the_example_goes_on_with_a_text_without_torch_and_without_this_package(runs):
    hook = (
        "import builtins, runpy, sys\n"
        "sys.modules.update({'torch': None, 'recurra': None})\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", hook, str(runs / "words.py"), PROMPT],
        env=environment | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == greedy(runs / "words", 20) + "\n"


def test_a_damaged_file_is_refused_here_and_by_its_program(runs, tmp_path, monkeypatch):
    sound = (runs / "words.onnx").read_bytes()
    damaged, program = tmp_path / "words.onnx", tmp_path / "words.py"
    program.write_bytes((runs / "words.py").read_bytes())
    monkeypatch.setattr(sys, "argv", [str(program), PROMPT])
    for place in (0, len(sound) // 2, -84, -83, -70, -1):
        content = bytearray(sound)
        content[place] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=f"{damaged} is damaged"):
            OnnxModel(damaged)
        with pytest.raises(SystemExit, match=f"{damaged} is damaged"):
            runpy.run_path(str(program), run_name="__main__")
    damaged.write_bytes(sound[:-1])
    with pytest.raises(ValueError, match=f"{damaged} is damaged"):
        OnnxModel(damaged)


def test_int8_is_close_and_its_difference_is_reported(runs):
    model = open_run(runs / "words").model
    difference = largest_difference(model, OnnxModel(runs / "int8.onnx"))
    assert 1e-6 < difference < 0.1
    said = (runs / "said").read_text()
    assert f"with int8 matrices, by {difference:.1e}\n" in said
    assert all(name in said for name in ("int8.onnx", "int8.tokenizer.json", "int8.py"))


def test_what_is_there_is_kept_unless_forced(runs, capsys):
    before = (runs / "words.onnx").read_bytes()
    assert main(["export", "onnx", str(runs / "words"), str(runs / "words.onnx")]) == 2
    assert "exists" in capsys.readouterr().err
    assert (runs / "words.onnx").read_bytes() == before
    assert (runs / "int8.py").read_bytes() == (runs / "words.py").read_bytes()  # written with --force


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["crt", "crt.onnx"], "CompactRecurrentTransformer cannot be exported"),
        (["words", "model.pt"], r"ends in .onnx"),
        (["nowhere", "n.onnx"], "nowhere"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_plain_words(runs, capsys, words, said):
    assert main(["export", "onnx", *(str(runs / word) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not (runs / words[1]).exists()


def test_a_graph_that_computes_something_else_is_not_written(runs, capsys, monkeypatch):
    wrong = onnx.load(runs / "words.onnx")
    bias = next(tensor for tensor in wrong.graph.initializer if tensor.name.endswith("head.bias"))
    bias.raw_data = (np.frombuffer(bias.raw_data, np.float32) + 0.01).tobytes()
    monkeypatch.setattr(onnx_file, "to_onnx", lambda model, tokenizer: wrong)
    assert main(["export", "onnx", str(runs / "words"), str(runs / "wrong.onnx")]) == 2
    assert "differ from the model's" in capsys.readouterr().err
    assert not (runs / "wrong.onnx").exists()
