"""The public API is kept: no name and no parameter goes without the major number, see docs/platforms.md."""

from importlib.util import find_spec

import pytest
from tools.public_api import PACKAGES, RECORD, described, lost

RECORDED = RECORD.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_recorded_name_and_parameter_is_there(package):
    if package == "recurra.huggingface" and not find_spec("transformers"):
        pytest.skip("needs the extra hf: pip install recurra[hf]")
    recorded = [line for line in RECORDED if line.partition("(")[0].rpartition(".")[0] == package]
    assert recorded
    assert lost(recorded, list(described(package))) == []


def test_the_record_is_of_public_packages_alone():
    assert {line.partition("(")[0].rpartition(".")[0] for line in RECORDED} == set(PACKAGES)


def test_what_goes_is_named():
    recorded = ["recurra.one(a, b)", "recurra.two", "recurra.three(a)"]
    assert lost(recorded, ["recurra.one(b, c)", "recurra.three(a, d)"]) == ["recurra.one: parameter a", "recurra.two"]
