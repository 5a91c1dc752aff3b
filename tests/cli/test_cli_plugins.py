"""Code that adds to Recurra: by an entry point of an installed package, or by --import."""

import sys

import pytest

from recurra.cli import main
from recurra.mixers.base import _mixers


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package with a module of this text, which the group of our entry points names."""

    def install(text: str) -> None:
        (tmp_path / "own_plugin_of_a_test.py").write_text(text)
        facts = tmp_path / "own_plugin-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text("[recurra_plugins]\nextra = own_plugin_of_a_test\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("own_plugin_of_a_test", None)


def test_a_plugin_is_imported_before_the_command(installed, capsys):
    installed("print('here')\n")
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith("here\n")


def test_a_plugin_that_fails_is_named_with_its_package(installed, capsys):
    installed("import something_that_is_not_there\n")
    assert main(["info"]) == 2
    assert capsys.readouterr().err == (
        "recurra info: the plugin extra of the package own-plugin: "
        "ModuleNotFoundError: No module named 'something_that_is_not_there'\n"
    )


def test_code_of_ones_own_is_imported_first(text_recipe, tmp_path, monkeypatch, restored, capsys):
    (tmp_path / "own_mixer_of_a_test.py").write_text(
        "from recurra.mixers import register_mixer\n"
        "from recurra.mixers.min_gru import MinGRU\n"
        "import recurra.mixers.base as registry\n"
        "if 'own-of-a-test' not in registry.list_mixers():\n"
        "    register_mixer('own-of-a-test')(type('Own', (MinGRU,), {}))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["train", str(text_recipe), "--run-dir", str(tmp_path / "run"), "--model.mixer", "own-of-a-test"]
    list(_mixers)  # imports those of the package, which register themselves once
    restored(_mixers)  # what it registers ends with the test
    assert main(words) == 2
    capsys.readouterr()
    assert main([*words, "--import", "own_mixer_of_a_test"]) == 0
    out = "".join(capsys.readouterr().out.split())  # the commands it prints import it too
    assert f"recurraeval{tmp_path / 'run'}--importown_mixer_of_a_test" in out
    assert f"recurragenerate{tmp_path / 'run'}--importown_mixer_of_a_test" in out
    assert main([*words, "--import", "own_mixer_of_a_test"]) == 2
    assert f"recurra train --resume {tmp_path / 'run'} --import own_mixer_of_a_test`" in capsys.readouterr().err


def test_arguments_are_parsed_before_code_is_imported(capsys):
    with pytest.raises(SystemExit):
        main(["info", "--import", "there_is_none", "--help"])
    assert "usage: recurra info" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["there.is.none", "own_code_of_tests.py", "own_code_of_tests.none", "./own.py", ""])
def test_a_module_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.delitem(sys.modules, "own_code_of_tests", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_code_of_tests.py").write_text("")
    assert main(["info", "--import", name]) == 2
    assert f"--import is {name!r}; expected a module that Python finds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import there_is_none", "ModuleNotFoundError: No module named 'there_is_none'"),
        ("[][3]", "IndexError: list index out of range"),
        ("raise RuntimeError", "RuntimeError"),
        ("def", "SyntaxError: invalid syntax (own_code_of_tests.py, line 1)"),
    ],
)
def test_an_error_in_code_of_ones_own_is_said_as_it_is(tmp_path, monkeypatch, capsys, code, said):
    monkeypatch.delitem(sys.modules, "own_code_of_tests", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_code_of_tests.py").write_text(code)
    words = ["info", "--import", "own_code_of_tests"]
    assert main(words) == 2
    assert capsys.readouterr().err == f"recurra info: --import own_code_of_tests: {said}\n"
    with pytest.raises(ValueError, match="own_code_of_tests") as error:
        main([*words, "--debug"])
    assert type(error.value.__cause__).__name__ == said.partition(":")[0]
