"""transformers' generate through a copy of the model that is prepared for decoding."""

import copy

import pytest
import torch
from tests.convert.huggingface.conftest import VOCABULARY, build

from recurra.convert.huggingface.modeling import RecurraForCausalLM
from recurra.decoding.steps import CompiledStep

pytestmark = pytest.mark.compile  # steps are recorded, which the shape checks refuse

NEW = 6


@pytest.fixture
def lm(lm) -> RecurraForCausalLM:
    return lm.float()


@pytest.fixture
def gateloop() -> RecurraForCausalLM:
    return build("gateloop").float()


def generate(lm, tokens, **options):
    return lm.generate(tokens, **{"max_new_tokens": NEW, "do_sample": False, **options})


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_float32_generates_what_the_model_does(lm, prompt, options, padded):
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :5] = 0
        prompt = prompt.masked_fill(mask == 0, VOCABULARY)
    expected = generate(lm, prompt, attention_mask=mask, **options)
    lm.prepare_for_decoding()
    assert torch.equal(generate(lm, prompt, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("numbers", ["float32", "int8", "int4"])
def test_every_token_after_the_prompt_is_a_compiled_step(gateloop, prompt, numbers, rows):
    gateloop.prepare_for_decoding(numbers)
    generate(gateloop, prompt[:rows])  # records the step of this many rows
    assert isinstance(gateloop._prepared, CompiledStep)
    read = []
    gateloop._prepared.embedding.register_forward_hook(lambda _, inputs, __: read.append(tuple(inputs[0].shape)))
    gateloop.model.embedding.register_forward_hook(lambda *_: read.append("the model itself"))
    generate(gateloop, prompt[:rows])
    assert read == [(rows, 7)]


@torch.no_grad()
def test_prompts_and_steps_have_the_same_weights(gateloop, prompt):
    gateloop.prepare_for_decoding("bfloat16")
    whole = gateloop(prompt).logits
    cache = gateloop(prompt[:, :5]).past_key_values
    last = [gateloop(prompt[:, t : t + 1], past_key_values=cache).logits for t in (5, 6)]
    torch.testing.assert_close(torch.cat(last, 1), whole[:, 5:], rtol=1e-4, atol=1e-5)
    gateloop.prepare_for_decoding(None)
    assert (gateloop(prompt).logits - whole).abs().max() > 1e-4  # the model's are not rounded


def test_with_gradients_the_model_itself_runs(gateloop, prompt):
    expected = gateloop(prompt, labels=prompt).loss
    gateloop.prepare_for_decoding("int8")
    loss = gateloop(prompt, labels=prompt).loss
    assert torch.equal(loss, expected)
    loss.backward()


def test_the_copy_is_neither_saved_nor_kept_in_training(gateloop, prompt):
    names = list(gateloop.state_dict())
    for drop in (lambda: gateloop.train().eval(), lambda: gateloop.prepare_for_decoding(None)):
        gateloop.prepare_for_decoding("int8")
        assert list(gateloop.state_dict()) == names
        assert gateloop.eval()._prepared is not None
        drop()
        assert gateloop._prepared is None


def test_a_copy_of_a_prepared_model_is_prepared(gateloop, prompt):
    gateloop.prepare_for_decoding()
    twin = copy.deepcopy(gateloop)
    assert twin._prepared is not gateloop._prepared
    assert torch.equal(generate(twin, prompt), generate(gateloop, prompt))


def test_the_copy_does_not_follow_the_model_until_it_is_prepared_again(gateloop, prompt):
    gateloop.eval().prepare_for_decoding("int8")
    with torch.no_grad():
        before = gateloop(prompt).logits
        for weight in gateloop.model.parameters():
            weight.mul_(1.5)
        gateloop.prepare_for_decoding("int8")
        after, own = gateloop(prompt).logits, gateloop.model(prompt)[0]
    assert (after - own).abs().max() < 0.1 * (after - before).abs().max()


def test_what_cannot_be_prepared(gateloop):
    with pytest.raises(ValueError, match="numbers is 'int3'"):
        gateloop.prepare_for_decoding("int3")
    with pytest.raises(ValueError, match="expected float32 on the CPU"):
        gateloop.double().prepare_for_decoding()
