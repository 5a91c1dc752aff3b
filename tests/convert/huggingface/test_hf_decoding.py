"""transformers' generate through a copy of the model that is prepared for decoding."""

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


@pytest.mark.parametrize(
    ("options", "padded"), [({}, True), ({"num_beams": 2, "num_return_sequences": 2}, False)], ids=str
)
def test_float32_generates_what_the_model_does(lm, prompt, options, padded):
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :5] = 0
        prompt = prompt.masked_fill(mask == 0, VOCABULARY)
    expected = generate(lm, prompt, attention_mask=mask, **options)
    lm.prepare_for_decoding()
    assert torch.equal(generate(lm, prompt, attention_mask=mask, **options), expected)


@pytest.mark.parametrize(("dtype", "rows", "calls"), [("float32", 3, [(3, 7)]), ("int8", 1, [])])
def test_every_token_after_the_prompt_is_a_compiled_step(gateloop, prompt, dtype, rows, calls):
    """A short prompt of one row is compiled, too."""
    gateloop.prepare_for_decoding(dtype)
    generate(gateloop, prompt[:rows])  # records the step of this many rows, and the prompt
    assert isinstance(gateloop.backbone._prepared, CompiledStep)
    read = []
    gateloop.backbone._prepared.embedding.register_forward_hook(
        lambda _, inputs, __: read.append(tuple(inputs[0].shape))
    )
    gateloop.model.embedding.register_forward_hook(lambda *_: read.append("the model itself"))
    generate(gateloop, prompt[:rows])
    assert read == calls


@torch.no_grad()
def test_prompts_and_steps_have_the_same_weights(gateloop, prompt):
    gateloop.prepare_for_decoding("bfloat16")
    whole = gateloop(prompt).logits
    cache = gateloop(prompt[:, :5]).past_key_values
    last = [gateloop(prompt[:, t : t + 1], past_key_values=cache).logits for t in (5, 6)]
    torch.testing.assert_close(torch.cat(last, 1), whole[:, 5:], rtol=1e-4, atol=1e-5)
    gateloop.prepare_for_decoding(None)
    assert (gateloop(prompt).logits - whole).abs().max() > 1e-4  # the model's are not rounded


def test_the_copy_is_neither_saved_nor_kept_in_training(gateloop, prompt):
    names = list(gateloop.state_dict())
    for drop in (lambda: gateloop.train().eval(), lambda: gateloop.prepare_for_decoding(None)):
        expected = gateloop(prompt, labels=prompt).loss
        gateloop.prepare_for_decoding("int8")
        assert torch.equal(gateloop(prompt, labels=prompt).loss, expected)  # with gradients the model itself runs
        assert list(gateloop.state_dict()) == names
        assert gateloop.eval().backbone._prepared is not None
        drop()
        assert gateloop.backbone._prepared is None
