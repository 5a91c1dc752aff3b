"""The public API is kept: no name and no parameter goes without the major number, see docs/platforms.md."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from tools.public_api import PACKAGES, RECORD, described, lost

RECORDED = RECORD.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_recorded_name_and_parameter_is_there(package):
    if package == "recurra.convert.huggingface" and not find_spec("transformers"):
        pytest.skip("needs the extra hf: pip install recurra[hf]")
    recorded = [line for line in RECORDED if line.partition("(")[0].rpartition(".")[0] == package]
    assert recorded
    assert lost(recorded, list(described(package))) == []


def test_the_record_is_of_public_packages_alone():
    assert {line.partition("(")[0].rpartition(".")[0] for line in RECORDED} == set(PACKAGES)


def test_what_goes_is_named():
    recorded = ["recurra.one(a, b)", "recurra.two", "recurra.three(a)"]
    found = ["recurra.one(d, b)", "recurra.three(a, d)"]
    assert lost(recorded, found) == ["recurra.one: parameter a", "recurra.two"]


@pytest.mark.parametrize(
    ("found", "places"),
    [
        ("a, b, c, *, d", []),
        ("a, b, c, d, e", []),
        ("a, b, c, e, *, f, d, **g", []),
        ("b, a, c, *, d", ["a", "b"]),
        ("a, e, b, c, *, d", ["b", "c"]),
        ("a, b, *, c, d", ["c"]),
        ("*, a, b, c, d", ["a", "b", "c"]),
    ],
)
def test_a_place_that_goes_is_named(found, places):
    lines = ["recurra.one(a, b, c, *, d)"], [f"recurra.one({found})"]
    assert lost(*lines) == [f"recurra.one: place of parameter {name}" for name in places]


def test_parameters_by_keyword_alone_stand_behind_a_star(monkeypatch):
    def one(a, /, b, *, c, d=3, **e): ...

    def two(*a, b): ...

    def three(a): ...

    names = {"one": one, "two": two, "three": three}
    monkeypatch.setitem(sys.modules, "a", SimpleNamespace(__all__=list(names), **names))
    assert list(described("a")) == ["a.one(a, b, *, c, d, **e)", "a.three(a)", "a.two(*, b)"]
