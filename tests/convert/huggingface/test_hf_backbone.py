"""The model without its head, and the arguments that transformers, PEFT and TRL pass: documents, vectors, depths."""

import copy

import pytest
import torch
from tests.convert.huggingface.conftest import VOCABULARY, build, greedy
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, DataCollatorWithFlattening, pipeline
from transformers.modeling_outputs import BaseModelOutputWithPast

from recurra.convert.huggingface.configuration import RecurrentCache
from recurra.convert.huggingface.modeling import causal_lm
from recurra.models.language_model import LanguageModel, LanguageModelConfig

LENGTHS = [3, 1, 7, 2]  # documents that end before, at and behind a segment's border


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def packed(documents, **options):
    rows = [{"input_ids": document.tolist()} for document in documents]
    return DataCollatorWithFlattening(**options)(rows)


def gradients(lm, loss):
    lm.zero_grad()
    loss.backward()
    return {name: None if each.grad is None else each.grad.clone() for name, each in lm.named_parameters()}


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_the_base_model_returns_what_the_head_reads(every_lm, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    output = every_lm.base_model(input_ids=prompt, attention_mask=mask, use_cache=False)
    assert isinstance(output, BaseModelOutputWithPast)
    assert output.past_key_values is None
    close(every_lm.model.head(output.last_hidden_state)[1:], every_lm(prompt, attention_mask=mask).logits[1:])
    assert not output.last_hidden_state[0, :4].any()
    first = every_lm.base_model(prompt[:, :3], use_cache=True)
    second, cache = every_lm.base_model(prompt[:, 3:], past_key_values=first.past_key_values, return_dict=False)
    assert cache is first.past_key_values
    close(second, every_lm.base_model(prompt).last_hidden_state[:, 3:])


def test_both_auto_classes_load_what_either_saved(lm, tmp_path, prompt):
    lm.save_pretrained(tmp_path / "lm")
    base = AutoModel.from_pretrained(tmp_path / "lm", torch_dtype=torch.float64, device_map="cpu")
    assert type(base) is type(lm.base_model)
    expected = lm.base_model(prompt).last_hidden_state
    close(base(prompt).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map="cpu", attn_implementation="sdpa")
    assert (type(again), again.dtype, again.device.type) == (type(lm), torch.float64, "cpu")
    close(again(prompt).logits, lm(prompt).logits)


@pytest.mark.parametrize("name", ["eager", "flash_attention_2", "kernels-community/flash-attn2"])
def test_attention_implementations_are_accepted(gateloop, tmp_path, name):
    gateloop.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert loaded.config._attn_implementation == name
    again = AutoModelForCausalLM.from_config(loaded.config, attn_implementation=name, dtype=torch.bfloat16)
    assert (again.config._attn_implementation, again.dtype) == (name, torch.bfloat16)
    with pytest.raises(ValueError, match="attn_implementation is 'flash'; expected one of eager, "):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash")


def test_hidden_states_are_what_enters_each_block(every_lm, prompt):
    """The tokens' alone: CRT and RMT put a memory beside them."""
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    output = every_lm(prompt, attention_mask=mask, output_hidden_states=True)
    alone = every_lm(prompt[:1, 4:], output_hidden_states=True)
    n_layer = every_lm.config.num_hidden_layers
    assert len(output.hidden_states) == len(alone.hidden_states) == n_layer + 1
    for depth, states in enumerate(output.hidden_states):
        close(states[0, 4:], alone.hidden_states[depth][0])
    close(every_lm.model.head(output.hidden_states[-1])[1:], output.logits[1:])
    entering = []
    for block in every_lm.model.blocks:
        block.register_forward_pre_hook(lambda _, given: entering.append(given[0][:, -2:]))
    for entered, states in zip(entering, every_lm(prompt[:, :2], output_hidden_states=True).hidden_states[:-1]):
        close(states, entered)
    assert len(entering) == n_layer
    every_lm.config.output_hidden_states = True
    assert len(every_lm(prompt, return_dict=False)) == 3  # logits, cache, hidden states


def test_packed_documents_are_each_as_alone(every_lm, documents):
    lm, batch = every_lm, packed(documents)
    output = lm(**batch, output_hidden_states=True, use_cache=True)
    alone = [lm(document[None], output_hidden_states=True, use_cache=True) for document in documents]
    close(output.logits, torch.cat([each.logits for each in alone], 1))
    for depth, states in enumerate(output.hidden_states):
        close(states, torch.cat([each.hidden_states[depth] for each in alone], 1))
    losses = [
        functional.cross_entropy(each.logits[0, :-1], document[1:], reduction="sum")
        for each, document in zip(alone, documents)
    ]
    n_targets = sum(LENGTHS) - len(LENGTHS)
    close(output.loss, sum(losses) / n_targets)
    found, expected = gradients(lm, output.loss), gradients(lm, sum(losses) / n_targets)
    for name in expected:
        close(found[name], expected[name])
    # labels of first tokens do not count, even if a collator leaves them in
    close(lm(**{**batch, "labels": batch["input_ids"]}).loss, output.loss)
    # the stream goes on from the last document, and can begin another
    token = torch.tensor([[4]])
    for position, cache in ((LENGTHS[-1], alone[-1].past_key_values), (0, None)):
        found = lm(token, position_ids=torch.tensor([[position]]), past_key_values=copy.copy(output.past_key_values))
        close(found.logits, lm(token, past_key_values=copy.copy(cache)).logits)


@pytest.mark.parametrize("marks", ["flash_attn_kwargs", "seq_idx"])
def test_other_marks_of_documents(lm, documents, marks):
    batch = packed(documents, return_position_ids=False, **{f"return_{marks}": True})
    alone = [lm(document[None]).logits for document in documents]
    close(lm(**batch).logits, torch.cat(alone, 1))
    close(lm(**packed(documents, **{f"return_{marks}": True})).logits, torch.cat(alone, 1))


def test_positions_of_rows_with_padding(lm, prompt):
    """Padding may have any positions; a document within a row begins where a counted token has 0."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0], [1] * 7])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 0, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    logits = lm(prompt, attention_mask=mask, position_ids=positions).logits
    for row, pieces in ((0, [[2, 3, 4, 5, 6]]), (1, [[0, 1], [2, 4], [5]]), (2, [[*range(7)]])):
        for steps in pieces:
            close(logits[row, steps], lm(prompt[row : row + 1, steps]).logits[0])


def test_a_packed_call_cannot_be_taken_back(gateloop, documents):
    cache = RecurrentCache(keeps=3)
    gateloop(**packed(documents), past_key_values=cache)
    with pytest.raises(ValueError, match="tokens_to_remove is -1; expected 0"):
        cache.crop(-1)
    gateloop(torch.tensor([[4, 5]]), past_key_values=cache)
    cache.crop(-1)


def test_vectors_in_place_of_tokens(every_lm, prompt):
    lm = every_lm
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    vectors = lm.get_input_embeddings()(prompt).detach().requires_grad_()
    padded = vectors.masked_fill(mask[..., None] == 0, float("nan"))
    expected = lm(prompt, attention_mask=mask, labels=prompt)
    output = lm(inputs_embeds=padded, attention_mask=mask, labels=prompt)
    close(output.logits, expected.logits)
    close(output.loss, expected.loss)
    (gradient,) = torch.autograd.grad(output.loss, vectors)
    assert gradient[1:].any()
    assert not gradient[0, :4].any()
    cache = RecurrentCache(keeps=4)
    lm(inputs_embeds=vectors, past_key_values=cache)
    cache.crop(-2)  # what is read again are vectors, and what follows are tokens
    close(lm(prompt[:, -2:], past_key_values=cache).logits, lm(prompt).logits[:, -2:])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generating_after_vectors(lm, prompt, options):
    options = {"max_new_tokens": 5, "do_sample": False, **options}
    expected = lm.generate(prompt, **options)[:, 7:]
    assert torch.equal(lm.generate(inputs_embeds=lm.get_input_embeddings()(prompt), **options), expected)


def test_positions_do_not_disturb_generating(lm, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = [greedy(lm, row[counts], 4) for row, counts in zip(prompt, mask.bool())]
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert lm.generate(prompt, position_ids=positions, **options)[:, 7:].tolist() == expected


def test_activation_checkpointing_gives_the_same_gradients(every_lm, prompt):
    lm = every_lm.train()
    for module in lm.modules():
        module.p = 0.0 if isinstance(getattr(module, "p", None), float) else getattr(module, "p", None)
    calls = [[] for _ in lm.model.blocks]
    for block, seen in zip(lm.model.blocks, calls):
        inner = next(module for name, module in block.named_modules() if name in ("mixer", "attention"))
        inner.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
    expected = gradients(lm, lm(prompt, labels=prompt).loss)
    once = [len(seen) for seen in calls]
    lm.activation_checkpointing_enable()
    assert lm.is_activation_checkpointing
    found = gradients(lm, lm(prompt, labels=prompt).loss)
    assert [len(seen) for seen in calls] == [3 * n for n in once]  # as before, and again in the backward pass
    for name in expected:
        close(found[name], expected[name])
    lm.activation_checkpointing_enable(every_n_layers=2)
    gradients(lm, lm(prompt, labels=prompt).loss)
    assert [len(seen) for seen in calls] == [(5, 4)[number % 2] * n for number, n in enumerate(once)]
    lm.activation_checkpointing_disable()
    assert not lm.is_activation_checkpointing
    gradients(lm, lm(prompt, labels=prompt).loss)
    assert [len(seen) for seen in calls] == [(6, 5)[number % 2] * n for number, n in enumerate(once)]
    with pytest.raises(ValueError, match="use_reentrant is True; expected False"):
        lm.activation_checkpointing_enable({"use_reentrant": True})


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_grows(tmp_path, prompt, tied):
    torch.manual_seed(0)
    config = LanguageModelConfig(VOCABULARY, VOCABULARY, 1, 12, 16, tie_embeddings=tied, embedding_scale=2.0)
    lm = causal_lm(LanguageModel(config)).eval()
    expected = lm(prompt).logits
    lm.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert (lm.get_input_embeddings().weight is lm.get_output_embeddings().weight) == tied
    torch.testing.assert_close(lm(prompt).logits[..., :VOCABULARY], expected)
    assert lm(prompt + 3).logits.shape == (3, 7, VOCABULARY + 3)
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == loaded.model.config.vocab_size == VOCABULARY + 3
    torch.testing.assert_close(loaded(prompt + 3).logits, lm(prompt + 3).logits)


def test_an_adaptive_vocabulary_stays(prompt):
    lm = build("transformer-xl")
    assert lm.resize_token_embeddings(VOCABULARY) is lm.get_input_embeddings()
    with pytest.raises(NotImplementedError, match="cannot become 24, as its embedding is adaptive"):
        lm.resize_token_embeddings(24)


def test_features_of_a_pipeline(gateloop):
    from tests.convert.huggingface.tiny_tokenizer import tiny_tokenizer

    extract = pipeline("feature-extraction", model=gateloop.base_model, tokenizer=tiny_tokenizer())
    features = torch.tensor(extract("w1 w2 w3"), dtype=torch.float64)
    ids = tiny_tokenizer()("w1 w2 w3", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(features, gateloop.base_model(ids).last_hidden_state.detach(), atol=1e-6, rtol=0)
