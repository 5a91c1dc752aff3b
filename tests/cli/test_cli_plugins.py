"""Installed packages that add to Recurra through an entry point."""

import sys

import pytest

from recurra.cli import main


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
