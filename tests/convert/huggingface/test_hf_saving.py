import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.convert.huggingface.conftest import MODELS, build
from transformers import AutoConfig, AutoModelForCausalLM

from recurra.convert.huggingface.configuration import RecurraConfig, config_for
from recurra.convert.huggingface.modeling import causal_lm
from recurra.ops.cells.orthogonal import NCGRUCell, Neumann


@pytest.fixture
def saved(lm, tmp_path):
    lm.save_pretrained(tmp_path)
    return tmp_path


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_a_round_trip_by_the_auto_classes(lm, saved, prompt):
    assert isinstance(AutoConfig.from_pretrained(saved), type(lm.config))
    loaded, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert type(loaded) is type(lm)
    assert not loaded.training
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float64
    torch.testing.assert_close(loaded(prompt).logits, lm(prompt).logits, atol=1e-13, rtol=0)
    assert torch.equal(
        loaded.generate(prompt, max_new_tokens=6, do_sample=False),
        lm.generate(prompt, max_new_tokens=6, do_sample=False),
    )


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    lm, saved = build("transformer-xl"), tmp_path
    lm.save_pretrained(saved)
    assert len(lm.get_expanded_tied_weights_keys()) == 7
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    stored = names(saved)
    assert len({id(parameter) for parameter in parameters.values()}) == len(stored & parameters.keys())
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    again = dict(loaded.named_parameters(remove_duplicate=False))
    tied = {
        (one, other)
        for one in parameters
        for other in parameters
        if one != other and parameters[one] is parameters[other]
    }
    assert tied == {(one, other) for one in again for other in again if one != other and again[one] is again[other]}


@pytest.mark.parametrize("name", MODELS)
def test_fresh_models_are_drawn_as_the_models_draw_them(name):
    torch.manual_seed(5)
    expected = MODELS[name]()
    torch.manual_seed(5)
    fresh = AutoModelForCausalLM.from_config(config_for(expected.config))
    for key, value in expected.state_dict().items():
        assert torch.equal(fresh.model.state_dict()[key], value), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_in_another_type(lm, saved, prompt, dtype):
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    # what makes transitions stays in float32
    assert {dtype} <= {parameter.dtype for parameter in loaded.parameters()} <= {dtype, torch.float32}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, lm.get_parameter(name).to(parameter.dtype)), name
    if dtype == torch.float32:
        torch.testing.assert_close(loaded(prompt).logits.double(), lm(prompt).logits, atol=1e-4, rtol=0)


def test_what_modules_keep_of_their_weights_is_made_anew(tmp_path, prompt):
    """The Neumann series goes on from an inverse that is not stored."""
    lm = build("crt-ncgru-adaptive")
    loaded = causal_lm(MODELS["crt-ncgru-adaptive"]().double())
    for model in (lm, loaded):
        model.model.memory.rnn.cell = NCGRUCell(12, 12, neumann=Neumann(order=2)).double()
    expected = lm.eval()(prompt.repeat(1, 2)).logits
    lm.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")

    class Known(type(lm)):
        def __init__(self, config):
            super().__init__(config, loaded.model)

    found = Known.from_pretrained(tmp_path)
    assert len(state) > 10
    torch.testing.assert_close(found(prompt.repeat(1, 2)).logits, expected, atol=1e-12, rtol=0)


def test_missing_weights_are_refused(gateloop, tmp_path):
    gateloop.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["backbone.model.norm.weight"]
    (tmp_path / "manifest.json").unlink()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"backbone\.model\.norm\.weight are missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_heads_by_the_name_of_transformers(tmp_path):
    config = RecurraConfig(model="transformer-xl", vocab_size=11, num_attention_heads=5)
    assert (config.n_heads, config.own().n_heads, config.to_dict()["num_attention_heads"]) == (5, 5, 5)
    config.n_heads = 2
    config.save_pretrained(tmp_path)
    assert RecurraConfig.from_pretrained(tmp_path).num_attention_heads == 2
    assert RecurraConfig.from_pretrained(tmp_path, num_attention_heads=10).own().n_heads == 10
    assert RecurraConfig(vocab_size=11).num_attention_heads == 1
