"""The registry of mixers."""

import pytest
from torch import nn

import recurra
from recurra.mixers import register_mixer
from recurra.registry import Registry


def test_gateloop_is_registered():
    assert "gateloop" in recurra.list_mixers()
    assert isinstance(recurra.create_mixer("gateloop", 8, n_heads=2), recurra.mixers.GateLoop)


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"unknown mixer 'gatelop'; there are: .*gateloop"):
        recurra.create_mixer("gatelop", 8)


def test_an_unknown_option_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"mixer 'gateloop' has no option heads; expected one of .*n_heads"):
        recurra.create_mixer("gateloop", 8, heads=2)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"mixer 'gateloop' is registered already"):
        register_mixer("gateloop")(nn.Identity)


def test_registry_is_sorted_and_counted():
    registry: Registry[int] = Registry("number")
    registry.register("two")(2)
    registry.register("one")(1)
    assert list(registry) == ["one", "two"]
    assert len(registry) == 2
    assert registry["two"] == 2
