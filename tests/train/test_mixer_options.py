"""Another mixer than the recipe's takes the options that it has too, and a note names the others."""

import textwrap
import warnings

import pytest

from recurra.cli import _warnings_as_notes
from recurra.models.registry import DataSizes
from recurra.train.recipe import RecipeError, load_recipe, read_family, to_yaml

GATELOOP = "experiment: memory-horizon\nmodel: {d_model: 64, mixer_options: %s}\n"
SMALL = GATELOOP % "{d_qk: 32, d_v: 64, n_heads: 4, transition: data}"


@pytest.fixture
def recipe(tmp_path):
    def write(text: str = SMALL) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def resolved(recipe: str, mixer: str, *words: str, notes: int = 1) -> tuple[dict, str]:
    """The options of another mixer, and what is said of those that are left out."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load_recipe(recipe, ["--model.mixer", mixer, *words]).model
    assert len(said) == notes
    return model.mixer_options, "; ".join(str(one.message) for one in said)


def test_options_that_both_have_are_kept_and_the_others_named(recipe):
    options, note = resolved(recipe(), "retnet")
    assert options == {"d_qk": 32, "d_v": 64, "n_heads": 4}
    assert note == "mixer retnet has no option 'transition' (of the recipe's gateloop): its defaults are used"
    options, note = resolved(recipe(), "s5")
    assert options == {}
    assert note.startswith("mixer s5 has no option 'd_qk', 'd_v', 'n_heads' or 'transition' (of")
    assert resolved(recipe(), "gateloop", notes=0)[0]["transition"] == "data"
    assert resolved(recipe(GATELOOP % "{n_heads: 4}"), "gla", notes=0)[0] == {"n_heads": 4}


@pytest.mark.parametrize(
    ("options", "mixer", "kept", "note"),
    [
        ("{transition: data}", "linear-rnn", {}, "linear-rnn does not take transition = 'data' (of"),
        ("{n_heads: 64, d_v: 64}", "slstm", {}, "slstm has no option 'd_v' and does not take n_heads = 64 (of"),
        ("{n_heads: 64}", "mamba3", {}, "mamba3 does not take n_heads = 64 (of the recipe's gateloop): its defaults"),
        ("{d_qk: 32, n_heads: 32}", "gla", {"d_qk": 32}, "gla does not take n_heads = 32 (of"),
        ("{d_qk: 64, d_v: 64, n_heads: 64}", "retnet", {"d_qk": 64, "d_v": 64}, "retnet does not take n_heads"),
    ],
)
def test_options_of_one_name_that_mean_something_else_are_left_out(recipe, options, mixer, kept, note):
    found = resolved(recipe(GATELOOP % options), mixer)
    assert found[0] == kept
    assert found[1].startswith(f"mixer {note}")


@pytest.mark.parametrize("mixer", ["gla", "mamba3"])
def test_heads_of_one_channel_are_those_of_the_recipe_s_width(recipe, mixer):
    for width in ("128", "256"):
        options, note = resolved(recipe(GATELOOP % "{n_heads: 64}"), mixer, "--model.d_model", width)
        assert options == {}
        assert "does not take n_heads = 64" in note


def test_options_set_by_override_stay_and_are_checked(recipe):
    assert resolved(recipe(), "s5", "--model.mixer_options.d_state", "8")[0] == {"d_state": 8}
    assert resolved(recipe(), "retnet", "--model.mixer_options", "{n_heads: 2}", notes=0)[0] == {"n_heads": 2}
    options, note = resolved(recipe(), "s5", "--model.mixer_options.transition=fixed")
    assert options == {"transition": "fixed"}
    assert "transition" not in note
    ring = recipe(GATELOOP % "{n_heads: 4, ring: {r_min: 0.9, r_max: 0.99}}")
    options, _ = resolved(ring, "gateloop-attention", "--model.mixer_options.ring.r_min", "0.5", notes=0)
    assert options == {"n_heads": 4, "ring": {"r_min": 0.5, "r_max": 0.99}}


def test_options_that_the_mixer_of_a_recipe_lacks_are_refused(recipe):
    text = SMALL.replace("mixer_options", "mixer: s5, mixer_options")
    for words in ([], ["--model.mixer", "s5"]):
        with pytest.raises(ValueError, match="mixer 's5' has no option d_qk, d_v, n_heads, transition; expected"):
            load_recipe(recipe(text), words).model.build(DataSizes(4, 4, 8))
    with pytest.raises(RecipeError, match="unknown mixer 's6'"):
        load_recipe(recipe(), ["--model.mixer", "s6"])


def test_lists_have_options_by_name(recipe):
    options, note = resolved(recipe(), "[gateloop, gru, s5, s5]", notes=2)
    assert options == {"gateloop": {"d_qk": 32, "d_v": 64, "n_heads": 4, "transition": "data"}}
    assert "mixer gru has no option" in note
    words = ["--model.mixer_options.s5.d_state=8"]
    assert resolved(recipe(), "[gateloop, gru, s5, s5]", *words, notes=2)[0] == {**options, "s5": {"d_state": 8}}
    assert resolved("memory-horizon/hybrid", "relative-attention", notes=0)[0] == {
        "n_heads": 4, "segment_length": 64, "mem_len": 64,
    }  # fmt: skip
    options, note = resolved("memory-horizon/hybrid", "gla")
    assert options == {"d_qk": 64, "d_v": 64}
    assert "'transition', 'segment_length' or 'mem_len' and does not take n_heads = 64 (of the recipe's" in note


def test_a_run_s_recipe_has_the_options_that_were_chosen(recipe, tmp_path):
    with pytest.warns(UserWarning, match="retnet"):
        experiment = load_recipe(recipe(), ["--model.mixer", "retnet"])
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    assert load_recipe(tmp_path / "config.yaml") == experiment


FAMILY = """
common: {experiment: memory-horizon, model: {mixer: gateloop, mixer_options: {n_heads: 4, transition: fixed}}}
axes:
  mixer:
    own: {}
    gla: {model: {mixer: gla, mixer_options: {d_qk: 16}}}
    odd: {model: {mixer: s6}}
  layers: {one: {model: {n_layer: 1}}}
"""


def test_a_variant_s_mixer_takes_the_options_of_its_family(recipe):
    family = read_family(recipe(FAMILY))
    assert family.variant("own-one")["model"]["mixer_options"] == {"n_heads": 4, "transition": "fixed"}
    with pytest.warns(UserWarning, match="mixer gla has no option 'transition'"):
        model = family.variant("gla-one")["model"]
    assert model == {"mixer": "gla", "mixer_options": {"n_heads": 4, "d_qk": 16}, "n_layer": 1}
    with pytest.raises(RecipeError, match="#odd-one: unknown mixer 's6'"):
        family.variant("odd-one")


def test_a_command_says_each_note_once_and_in_one_line():
    with _warnings_as_notes():
        here = ("the note", UserWarning, load_recipe.__code__.co_filename, 3)
        assert [warnings.formatwarning(*here), warnings.formatwarning(*here)] == ["note: the note\n", ""]
        assert "test_mixer_options.py:3: UserWarning" in warnings.formatwarning(*here[:2], __file__, 3)
    assert "recipe.py:3: UserWarning" in warnings.formatwarning(*here)
