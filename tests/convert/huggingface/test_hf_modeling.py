import copy
from types import SimpleNamespace

import pytest
import torch
from tests.convert.huggingface.conftest import MODELS, VOCABULARY, build
from torch.nn import functional
from transformers import DynamicCache, Trainer
from transformers.trainer_pt_utils import LabelSmoother

from recurra.convert.huggingface.configuration import RecurraConfig, config_for
from recurra.convert.huggingface.modeling import causal_lm
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.registry import DataSizes, list_models


def test_every_language_model_is_tried():
    assert {type(build()) for build in MODELS.values()} == {entry.model for entry in list_models(DataSizes)}


def test_padding_anywhere_changes_nothing(every_lm, prompt):
    lm = every_lm
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1], [1] * 7])
    tokens = prompt.masked_fill(mask == 0, VOCABULARY + 5)  # an id of its own, which the embedding does not know
    output = lm(tokens, attention_mask=mask)
    for row, counts in enumerate(mask.bool()):
        alone = lm.model(prompt[row][counts][None])[0][0]
        torch.testing.assert_close(output.logits[row][counts], alone, atol=1e-12, rtol=0)
        assert not output.logits[row][~counts].any()
    # the next token, with the mask over all columns or over the new one
    longer = torch.cat([mask, torch.ones(3, 1)], 1)
    for over in (longer, longer[:, -1:], None):
        cache = copy.copy(output.past_key_values)
        after = lm(prompt[:, :1], attention_mask=over, past_key_values=cache).logits
        for row, counts in enumerate(mask.bool()):
            text = torch.cat([prompt[row][counts], prompt[row, :1]])
            torch.testing.assert_close(after[row, -1], lm.model(text[None])[0][0, -1], atol=1e-12, rtol=0)


def test_the_loss_is_of_the_next_tokens(lm, prompt):
    labels = prompt.clone()
    labels[0, 3] = labels[2, 6] = -100
    output = lm(prompt, labels=labels)
    logits, targets = output.logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
    expected = functional.cross_entropy(logits, targets, ignore_index=-100)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=0)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    expected = functional.cross_entropy(
        lm.model(prompt)[0][:, :-1].reshape(-1, VOCABULARY), targets, ignore_index=-100, reduction="sum"
    )
    (expected / 16).backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=0)
    assert torch.isclose(lm(prompt, labels=labels, num_items_in_batch=4).loss, expected / 4, atol=1e-12)


def test_labels_at_and_behind_padding_do_not_count(lm, prompt):
    """The first token of a left-padded row has nothing before it, also where its label is there."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1], [1] * 7])
    loss = lm(prompt, attention_mask=mask, labels=prompt).loss
    losses = []
    for row, counts in enumerate(mask.bool()):
        text = prompt[row][counts]
        losses.append(functional.cross_entropy(lm.model(text[None])[0][0, :-1], text[1:], reduction="none"))
    torch.testing.assert_close(loss, torch.cat(losses).mean(), atol=1e-12, rtol=0)


def test_the_trainers_count_of_labels_does_not_scale_the_loss(lm, prompt):
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [1] * 7, [0, 0, 0, 1, 1, 1, 1]])
    labels = prompt.masked_fill(mask == 0, -100)
    count = (labels[:, 1:] != -100).sum()  # of which two stand right after padding
    expected = lm(prompt, attention_mask=mask, labels=labels).loss
    loss = lm(prompt, attention_mask=mask, labels=labels, num_items_in_batch=count).loss
    torch.testing.assert_close(loss, expected)


def test_the_trainer_shifts_labels_that_it_smooths(lm, prompt):
    """Trainer itself needs the package accelerate; this is its method on its own."""
    labels = prompt.clone()
    labels[1, 4] = -100
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        args=SimpleNamespace(average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=LabelSmoother(epsilon=0.1),
        model_accepts_loss_kwargs=True,
    )
    loss = Trainer.compute_loss(trainer, lm, {"input_ids": prompt, "labels": labels})
    logits, targets = lm(prompt).logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
    logs = logits.log_softmax(-1)[targets != -100]
    right = logs.gather(-1, targets[targets != -100, None]).mean()
    torch.testing.assert_close(loss, -0.9 * right - 0.1 * logs.mean(), atol=1e-6, rtol=0)  # it sums in float32


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 4])])
def test_only_the_logits_that_are_kept_are_made(lm, prompt, kept):
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    where = kept if isinstance(kept, torch.Tensor) else slice(-kept, None)
    expected = lm(prompt, attention_mask=mask).logits[:, where]
    torch.testing.assert_close(
        lm(prompt, attention_mask=mask, logits_to_keep=kept).logits, expected, atol=1e-13, rtol=0
    )


def test_the_cache_is_given_where_it_is_wanted(gateloop, prompt):
    assert gateloop(prompt).past_key_values is not None
    assert gateloop(prompt, use_cache=False).past_key_values is None
    gateloop.train()
    assert gateloop(prompt).past_key_values is None
    assert gateloop(prompt, use_cache=True).past_key_values is not None
    gateloop.eval().config.use_cache = False
    assert gateloop(prompt).past_key_values is None


def test_what_does_not_fit_is_refused(gateloop, prompt):
    cache = gateloop(prompt).past_key_values
    refused = [
        ({"attention_mask": torch.ones(3, 6)}, r"attention_mask is of shape \(3, 6\)"),
        ({"attention_mask": torch.ones(3, 1, 7, 7)}, "attention_mask is of shape"),
        ({"past_key_values": DynamicCache()}, "expected a RecurrentCache"),
        ({"labels": prompt, "logits_to_keep": 1}, "expected 0 beside labels"),
        ({"output_attentions": True}, "output_attentions is True; expected False"),
        ({"inputs_embeds": torch.ones(3, 7, 12)}, "input_ids is given beside inputs_embeds; expected one of"),
        ({"position_ids": torch.zeros(3, 6)}, r"position_ids is float32 \(3, 6\) on cpu; expected shape \(3, 7\)"),
        ({"cache_position": torch.tensor([1])}, r"cache_position\[0\] is 1; expected 0, "),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            gateloop(prompt, **options)
    with pytest.raises(ValueError, match="3 streams and input_ids of 1 rows"):
        gateloop(prompt[:1], past_key_values=cache)
    with pytest.raises(IndexError):
        gateloop(prompt + VOCABULARY)
    with pytest.raises(ValueError, match="input_ids is None; expected one of"):
        gateloop()
    with pytest.raises(TypeError, match="unexpected keyword argument 'token_type_ids'"):
        gateloop(prompt, token_type_ids=prompt)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("crt-gru", torch.float16),
        ("transformer-xl", torch.bfloat16),
    ],
)
def test_short_floats(name, prompt, dtype):
    lm = build(name)
    expected = lm(prompt).logits.softmax(-1)
    short = lm.to(dtype)
    output = short(prompt)
    torch.testing.assert_close(output.logits.double().softmax(-1), expected, atol=0.05, rtol=0)
    after = short(prompt[:, :1], past_key_values=output.past_key_values).logits
    whole = short(torch.cat([prompt, prompt[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(after.softmax(-1), whole.softmax(-1), atol=0.05, rtol=0)
    assert short.generate(prompt, max_new_tokens=3, do_sample=False).shape == (3, 10)


def test_the_configuration_holds_the_models_own():
    for name in MODELS:
        model = MODELS[name]()
        config = config_for(model.config, bos_token_id=3)
        assert config.own() == model.config
        assert (config.hidden_size, config.num_hidden_layers, config.bos_token_id) == (12, model.config.n_layer, 3)
        assert RecurraConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
        assert RecurraConfig(**config.to_diff_dict()).own() == model.config


def test_configurations_that_cannot_be():
    message = "output_size is 3; expected vocab_size = 5: a causal language model predicts the tokens that it reads"
    with pytest.raises(ValueError, match=message):
        causal_lm(LanguageModel(LanguageModelConfig(5, 3, 1, 4, 4)))
    with pytest.raises(ValueError, match="n_layer is 0"):
        RecurraConfig(vocab_size=5, n_layer=0)
    with pytest.raises(ValueError, match=r"model is 'timesformer'; expected one of .*, recurrent, "):
        RecurraConfig(model="timesformer")
    with pytest.raises(TypeError, match=r"expected one of .*, LanguageModelConfig"):
        config_for(3)
