"""`recurra` itself: which commands there are, how errors come out, what `info` and `recipes` print."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.cli.conftest import failure
from tests.processes import in_new_interpreter

from recurra.cli import _let_threads_sleep, main
from recurra.train.recipe import find_recipe, recipe_names


def test_the_commands_are_listed(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in ("train", "eval", "plot", "demo", "info"):
        assert f"  {name}" in listed
    assert main(["trian"]) == 2
    assert "recurra: unknown command 'trian': did you mean train?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("recurra co", {"compare", "convert", "cost"}),
        ("recurra train", {"train"}),
        ("recurra eval runs/text --spl", {"--split"}),
        ("recurra eval runs/text --split ", {"train", "valid", "test"}),
        ("recurra train te", {"text", "text/gateloop"}),
        ("recurra generate bo", {"books"}),
        ("recurra eval t", {"tale"}),
        ("recurra train demo/", {"demo/data-controlled", "demo/fixed"}),
        ("recurra export ", {"hf", "gguf", "onnx", "web"}),
        ("recurra export web run --weights f", {"float16", "float32"}),
        ("python -m recurra serve --max-s", {"--max-streams"}),
    ],
)
def test_a_shell_completes_a_line(line, offered, tmp_path):
    answer = tmp_path / "answer"
    (tmp_path / "runs" / "tale").mkdir(parents=True)
    (tmp_path / "runs" / "tale" / "config.yaml").touch()
    asked = {"_ARGCOMPLETE": "3" if line.startswith("python") else "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['recurra']; from recurra.cli import main; main()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, cwd=tmp_path, check=True)
    assert {word.strip() for word in answer.read_text(encoding="utf-8").split("\n")} - {"-h", "--help"} == offered


def test_a_folder_without_a_run_is_refused(capsys, tmp_path):
    for command in ("eval", "plot"):
        assert "expected the folder of a run" in failure(capsys, command, str(tmp_path))
    assert "expected the folder of a run" in failure(capsys, "train", "--resume", str(tmp_path))


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("av", 'av is missing: pip install "recurra[video]"'),
        ("onnx.checker", 'onnx.checker is missing: pip install "recurra[export]"'),
    ],
)
def test_a_missing_extra_is_named(capsys, monkeypatch, package, said):
    def fail(arguments):
        raise ImportError("not there", name=package)

    monkeypatch.setattr("recurra.cli.info.info", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == f"recurra info: {said}\n"
    monkeypatch.setenv("RECURRA_DEBUG", "1")
    with pytest.raises(ImportError, match="not there"):
        main(["info"])


def fail_with(error):
    def fail(arguments):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("a part of recurra", name="recurra.nothing"), "ImportError: a part of recurra"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("mat1 and mat2 cannot be multiplied"), "RuntimeError: mat1 and mat2 cannot be multiplied"),
    ],
)
def test_a_mistake_of_ours_is_one_sentence_with_an_exit_code_of_its_own(capsys, monkeypatch, error, said):
    monkeypatch.setattr("recurra.cli.info.info", fail_with(error))
    assert main(["info"]) == 70
    end = "This is a bug; please report it with the traceback that --debug shows"
    assert capsys.readouterr().err == f"recurra info: {said}. {end}\n"
    for words in (["info", "--debug"], ["--debug", "info"]):
        with pytest.raises(type(error)):
            main(words)


def test_a_value_of_a_wrong_type_is_no_mistake_of_ours(capsys, monkeypatch):
    monkeypatch.setattr("recurra.cli.info.info", fail_with(TypeError("d_qk is 'abc', a str; expected a number")))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "recurra info: d_qk is 'abc', a str; expected a number\n"


def test_an_interrupt_has_its_own_exit_code(capsys, monkeypatch):
    monkeypatch.setattr("recurra.cli.info.info", fail_with(KeyboardInterrupt()))
    assert main(["info", "--debug"]) == 130
    assert capsys.readouterr().err == "recurra info: interrupted\n"


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (lambda: torch.empty(2**50), "could not allocate 4503599627370496 bytes"),
        (lambda: np.empty(2**50), "could not allocate 8.00 PiB"),
        (lambda: bytearray(2**60), "an allocation failed"),
    ],
)
def test_too_little_memory_says_how_much_was_asked_for(capsys, monkeypatch, allocate, said):
    monkeypatch.setattr("recurra.cli.info.info", lambda arguments: allocate())
    assert main(["info"]) == 2
    expected = f"recurra info: out of memory: {said}; use a smaller model, batch or sequence\n"
    assert capsys.readouterr().err == expected


def test_debug_reaches_no_command_and_is_a_value_after_two_dashes(monkeypatch):
    seen = []
    monkeypatch.setattr("recurra.cli.train.recipes", lambda arguments: seen.append(arguments.name) or 0)
    assert main(["recipes", "--debug", "--", "--debug"]) == 0
    assert seen == ["--debug"]


def test_a_reader_that_goes_away_is_no_error():
    # In place of the command's module, which takes as long to import as torch.
    code = "import sys, types; from recurra.cli import main\n"
    code += "def run(arguments):\n    while True: print('more')\n"
    code += "sys.modules['recurra.cli.info'] = types.SimpleNamespace(info=run)\nraise SystemExit(main(['info']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_info_names_versions_backends_and_mixers(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "reference on cpu", "gateloop", "memory-horizon"):
        assert word in text
    assert re.search(r"^triton on cpu +no: Triton", text, re.MULTILINE)


def test_all_recipes_are_listed_with_their_variants(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())
    assert next(line for line in out.splitlines() if "ptb/transformers " in line).split("│")[2].strip() == "36"


def test_one_recipe_is_printed_as_it_is(capsys):
    assert main(["recipes", "demo/fixed"]) == 0
    assert capsys.readouterr().out == find_recipe("demo/fixed").read_text(encoding="utf-8")


# --- threads ---


def test_openmp_reads_it():
    program = """
import ctypes, importlib.util, os, pathlib, sys
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)
os.environ["OMP_DISPLAY_ENV"] = "verbose"
from recurra.cli import main
main(["--version"])
assert "torch" not in sys.modules
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
for library in folder.glob("libgomp*"):  # torch loads it, but takes seconds
    ctypes.CDLL(str(library))
"""
    said = in_new_interpreter(program)
    assert "GOMP_SPINCOUNT = '1000'" in said or sys.platform != "linux"  # elsewhere torch has another OpenMP


@pytest.mark.parametrize(
    ("variables", "loaded", "spins"),
    [({"GOMP_SPINCOUNT": "7"}, False, "7"), ({"OMP_WAIT_POLICY": "passive"}, False, None), ({}, True, None)],
)
def test_what_was_chosen_before_stays(monkeypatch, variables, loaded, spins):
    environment = dict(variables)
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr(sys, "modules", {"torch": None} if loaded else {})
    _let_threads_sleep()
    assert environment.get("GOMP_SPINCOUNT") == spins
