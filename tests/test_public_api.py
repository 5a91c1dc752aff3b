"""The public API is kept: no name and no parameter goes without the major number, see docs/platforms.md."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from tools.public_api import PACKAGES, RECORD, described, lost

RECORDED = RECORD.read_text(encoding="utf-8").splitlines()


def package_of(line: str) -> str:
    return line.partition("(")[0].rpartition(".")[0]


def test_every_recorded_name_and_parameter_is_there():
    assert {package_of(line) for line in RECORDED} <= set(PACKAGES)
    packages = set(PACKAGES) if find_spec("transformers") else set(PACKAGES) - {"recurra.convert.huggingface"}
    recorded = [line for line in RECORDED if package_of(line) in packages]
    assert lost(recorded, [line for package in packages for line in described(package)]) == []


def test_what_goes_is_named():
    recorded = ["recurra.one(a, b)", "recurra.two", "recurra.three(a)"]
    found = ["recurra.one(d, b)", "recurra.three(a, d)"]
    assert lost(recorded, found) == ["recurra.one: parameter a", "recurra.two"]


@pytest.mark.parametrize(
    ("found", "moved"),
    [
        ("a, b, c, d, e", []),
        ("a, b, c, e, *, f, d, **g", []),
        ("a, e, b, c, *, d", ["b", "c"]),
        ("a, b, *, c, d", ["c"]),
    ],
)
def test_a_parameter_that_moves_is_named(found, moved):
    expected = [f"recurra.one: place of parameter {name}" for name in moved]
    assert lost(["recurra.one(a, b, c, *, d)"], [f"recurra.one({found})"]) == expected


def test_keyword_only_parameters_follow_a_star(monkeypatch):
    def one(a, /, b, *, c, d=3, **e): ...

    def two(*a, b): ...

    monkeypatch.setitem(sys.modules, "a", SimpleNamespace(__all__=["one", "two"], one=one, two=two))
    assert list(described("a")) == ["a.one(a, b, *, c, d, **e)", "a.two(*, b)"]
