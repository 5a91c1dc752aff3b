"""TRL's trainers and PEFT's adapters: three updates each of a tiny model, on one text again and again."""

import math

import pytest
import torch
from tests.convert.huggingface.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM

from recurra.convert.huggingface.modeling import RecurraForCausalLM, causal_lm
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

TEXT = "w1 w2 w3 w4 w1 w2 w5 w4 "
"""The trainer puts <eos> behind it, which is a word by itself only behind a blank."""
SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.02,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # as the tokenizer's, which TRL takes over


def build(mixer="gateloop", **options) -> RecurraForCausalLM:
    torch.manual_seed(0)
    if mixer == "crt":
        sizes = {"n_layer": 2, "d_model": 12, "n_heads": 2, "d_channel_mixing": 16, "dropout": 0.0}
        config = CompactRecurrentTransformerConfig(vocab_size=23, segment_length=5, **sizes)
        return causal_lm(CompactRecurrentTransformer(config), **TOKENS)
    return causal_lm(LanguageModel(LanguageModelConfig(23, None, 2, 16, 16, mixer=mixer, **options)), **TOKENS)


def lora():
    return peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def own_loss(lm) -> float:
    ids = tiny_tokenizer()(f"{TEXT}<eos>", return_tensors="pt")["input_ids"]
    return float(lm.eval()(ids, labels=ids).loss)


def train(trainer) -> tuple[list[float], set[str]]:
    """The losses, and the names of the parameters that moved."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, each in trainer.model.named_parameters() if not torch.equal(each, before[name])}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], moved


def sft(lm, folder, adapter=None, **options):
    rows = datasets.Dataset.from_dict({"text": [TEXT] * 6})
    settings = trl.SFTConfig(str(folder), **{**SETTINGS, **options})
    return trl.SFTTrainer(lm, settings, train_dataset=rows, processing_class=tiny_tokenizer(), peft_config=adapter)


PACKED = {"packing": True, "max_length": 20}
"""Two texts in a row: they must not see each other."""


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({"tie_embeddings": True}, {"padding_free": True, "max_length": None}),
        *(
            pytest.param(model, options, marks=pytest.mark.slow)
            for model, options in (
                ({}, {}),
                ({"logit_cap": 2.0}, PACKED),
                ({"mixer": "gateloop-attention"}, PACKED),
                ({"mixer": "crt"}, PACKED),
            )
        ),
    ],
    ids=str,
)
def test_sft(tmp_path, model, options):
    lm = build(**model)
    expected = own_loss(lm)
    losses, moved = train(sft(lm, tmp_path, **options))
    assert losses[0] == pytest.approx(expected, abs=1e-4)  # the trainer rounds it
    assert losses[2] < losses[1] < losses[0]
    assert moved == {name for name, _ in lm.named_parameters()}
    assert own_loss(lm) < losses[2]


def test_sft_by_its_defaults(tmp_path):
    """In bfloat16, and with activation checkpointing."""
    trainer = sft(build(), tmp_path, bf16=None)
    losses, _ = train(trainer)
    assert trainer.args.bf16
    assert trainer.model.is_activation_checkpointing
    assert losses[2] < losses[0]


def test_sft_with_lora(tmp_path):
    lm = build()
    expected = own_loss(lm)
    losses, moved = train(sft(lm, tmp_path, lora(), **PACKED))
    assert losses[0] == pytest.approx(expected, abs=1e-4)
    assert losses[2] < losses[0]
    assert all("lora_" in name for name in moved)
    assert {name.split(".blocks.")[1][0] for name in moved} == {"0", "1"}


def test_prompt_tuning(tmp_path):
    lm = build()
    trainer = sft(lm, tmp_path, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    losses, moved = train(trainer)
    assert losses[2] < losses[0]
    assert len(moved) == 1
    assert "prompt_encoder" in moved.pop()
    tuned = trainer.model.eval()
    ids = torch.tensor([[2, 3, 4], [5, 6, 7]])
    vectors = torch.cat([tuned.get_prompt(2), lm.get_input_embeddings()(ids)], 1)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = lm.generate(inputs_embeds=vectors, **options)
    for more in ({}, {"use_cache": False}):
        found = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options, **more)
        assert torch.equal(found[:, 3:], expected)


@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        pytest.param(None, {"padding_free": True}, marks=pytest.mark.slow, id="full"),
        pytest.param(lora, {}, id="lora"),
    ],
)
def test_dpo(tmp_path, adapter, options):
    build().save_pretrained(tmp_path / "model")  # from where the trainer loads the reference
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    columns = {"prompt": ["w1 w2"] * 4, "chosen": [" w3 w4 w5"] * 4, "rejected": [" w6"] * 4}
    trainer = trl.DPOTrainer(
        lm,
        args=trl.DPOConfig(str(tmp_path), **SETTINGS, **options),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tiny_tokenizer(),
        peft_config=adapter and adapter(),
    )
    losses, moved = train(trainer)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[2] < losses[1] < losses[0]
    assert all("lora_" in name for name in moved) == (adapter is not None)


@pytest.mark.parametrize("adapter", [None, pytest.param(lora, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_grpo(tmp_path, adapter):
    lm = build()
    trainer = trl.GRPOTrainer(
        lm,
        reward_funcs=lambda completions, **_: [float(number % 2) for number in range(len(completions))],
        args=trl.GRPOConfig(str(tmp_path), **SETTINGS, num_generations=2, max_completion_length=4),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2", "w3"] * 2}),
        processing_class=tiny_tokenizer(),
        peft_config=adapter and adapter(),
    )
    losses, moved = train(trainer)
    assert len(losses) == 3
    assert moved
    assert all("lora_" in name for name in moved) == (adapter is not None)
