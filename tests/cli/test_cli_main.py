"""`recurra` itself: which commands there are, and how errors come out."""

import subprocess
import sys

import pytest
from tests.cli.conftest import failure

from recurra.cli import main


def test_the_commands_are_listed(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in ("train", "eval", "plot", "demo", "info"):
        assert f"  {name}" in listed
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(capsys, tmp_path):
    for command in ("eval", "plot"):
        assert "expected the folder of a run" in failure(capsys, command, str(tmp_path))
    assert "expected the folder of a run" in failure(capsys, "train", "--resume", str(tmp_path))


def test_debug_shows_where_an_error_comes_from(monkeypatch):
    monkeypatch.setenv("RECURRA_DEBUG", "1")
    with pytest.raises(ValueError, match="nowhere"):
        main(["train", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("av", "av is missing: pip install recurra[video]"),
        ("onnx.checker", "onnx.checker is missing: pip install recurra[export]"),
    ],
)
def test_a_missing_extra_is_named(capsys, monkeypatch, package, said):
    def fail(words):
        raise ImportError("not there", name=package)

    monkeypatch.setattr("recurra.cli.info.run", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == f"recurra info: {said}\n"
    monkeypatch.setenv("RECURRA_DEBUG", "1")
    with pytest.raises(ImportError, match="not there"):
        main(["info"])


def test_another_import_error_is_a_mistake_of_ours(monkeypatch):
    def fail(words):
        raise ImportError("a part of recurra", name="recurra.nothing")

    monkeypatch.setattr("recurra.cli.info.run", fail)
    with pytest.raises(ImportError, match="a part of recurra"):
        main(["info"])


def test_a_reader_that_goes_away_is_no_error():
    code = "from recurra.cli import main; import recurra.cli.info as i\n"
    code += "def run(words):\n    while True: print('more')\ni.run = run\nraise SystemExit(main(['info']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
