"""The registry of mixers."""

import pytest

import recurra


def test_a_mixer_loads_no_other_and_its_package_finds_the_names_of_all(run_python):
    program = """
    import sys
    import recurra
    recurra.create_mixer("min-gru", 4)
    print(*(name for name in sys.modules if name.startswith("recurra.mixers.")))
    from recurra.mixers import RNNState, create_mixer
    print(RNNState.__module__, hasattr(recurra.mixers, "MinGRUs"), hasattr(recurra.mixers, "Tensor"))
    print(*{"min-gru", "s5-hyena"} & set(recurra.list_mixers()))
    """
    loaded, found, listed = run_python(program).splitlines()
    assert set(loaded.split()) == {f"recurra.mixers.{name}" for name in ("base", "min_gru")}
    assert found == "recurra.mixers.rnn False False"
    assert len(listed.split()) == 2


def test_an_unknown_name_gets_near_ones_or_all():
    with pytest.raises(ValueError, match=r"^unknown mixer 'gatelop': did you mean gateloop\?$"):
        recurra.create_mixer("gatelop", 8)
    with pytest.raises(ValueError, match=r"^unknown mixer 'q'; there are: delta-net, .*zamba2; import .*--import M"):
        recurra.create_mixer("q", 8)


def test_an_unknown_option_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"mixer 'gateloop' has no option heads; expected one of .*n_heads"):
        recurra.create_mixer("gateloop", 8, heads=2)
    with pytest.raises(ValueError, match=r"mixer 'gru' has no option heads; expected no options$"):
        recurra.create_mixer("gru", 8, heads=2)


def test_a_name_is_given_once(run_python):
    """Also if nothing has imported the mixer of that name yet."""
    program = """
    from recurra.mixers import create_mixer, register_mixer
    for _ in range(2):
        try:
            register_mixer("gateloop")(int)
        except ValueError as error:
            print(error)
    print(type(create_mixer("gateloop", 4)).__name__)
    """
    message = "mixer 'gateloop' is registered already; choose another name"
    assert run_python(program).splitlines() == [message, message, "GateLoop"]
