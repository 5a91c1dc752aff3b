"""A published Mamba, fine-tuned by TRL and by `recurra train`, merged, in transformers, in llama.cpp: one text."""

from pathlib import Path

import pytest
import torch
import yaml
from tests.train.conftest import quiet

pytest.importorskip("trl", reason="needs TRL: pip install trl")
pytest.importorskip("peft", reason="needs the extra hf: pip install recurra[hf]")
pytest.importorskip("transformers", reason="needs the extra hf: pip install recurra[hf]")
pytest.importorskip("gguf", reason="needs the extra hf: pip install recurra[hf]")
pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")

import peft
import transformers
import trl
from datasets import Dataset
from tests.convert.huggingface.test_hf_trl import SETTINGS
from tests.convert.published.test_gguf import llama_cpp

from recurra.cli import main
from recurra.convert.huggingface import causal_lm, fast_tokenizer
from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.data.tokenizers import BytePairEncoding
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream
from recurra.train.formats import convert_model
from recurra.train.run import open_run, start_run

TEXT = "the cat saw a dog and the dog ran away but the bird sang a song to the moon\n"
PROMPT, N_TOKENS = "the cat saw", 10
SHAPE = {
    **{"n_layer": 2, "d_model": 32, "d_channel_mixing": 0, "mixer": "mamba", "norm": "rms", "biases": False},
    **{"tie_embeddings": True, "mixer_options": {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": 2}},
}


@pytest.fixture
def published(tmp_path) -> Path:
    """A folder in transformers' layout, whose model has not learnt the text."""
    torch.manual_seed(0)
    tokenizer = BytePairEncoding.train([TEXT], 280)
    to_huggingface(PortableModel(LanguageModel(LanguageModelConfig(280, None, **SHAPE)), tokenizer), tmp_path / "mamba")
    return tmp_path / "mamba"


def of_recurra(portable: PortableModel) -> str:
    stream = Stream(portable.model.eval(), portable.tokenizer)
    stream.feed(PROMPT)
    return "".join(stream.generate_text(N_TOKENS, sampling=SamplingConfig(temperature=0.0)))


def of_transformers(lm, tokenizer) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    written = lm.eval().generate(ids, max_new_tokens=N_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    return tokenizer.decode(written[0, ids.shape[1] :])


def further_stations(folder: Path, merged: PortableModel, tmp_path: Path) -> list[str]:
    """What merged weights write in transformers' own class and in llama.cpp."""
    own = transformers.MambaForCausalLM.from_pretrained(folder)
    assert main(["convert", str(folder), str(tmp_path / "model.gguf")]) == 0
    written, *_ = llama_cpp(tmp_path / "model.gguf", PROMPT, N_TOKENS)
    return [of_transformers(own, fast_tokenizer(merged.tokenizer)), written]


def test_by_trl(published, tmp_path):
    base = from_huggingface(published)
    tokenizer = fast_tokenizer(base.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    trainer = trl.SFTTrainer(
        causal_lm(base.model),
        trl.SFTConfig(str(tmp_path / "trl"), **{**SETTINGS, "max_steps": 60, "learning_rate": 0.05}),
        train_dataset=Dataset.from_dict({"text": [TEXT * 4] * 4}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    texts = [of_transformers(trainer.model, tokenizer)]
    merged = PortableModel(trainer.model.merge_and_unload().model, base.tokenizer)
    texts.append(of_recurra(merged))
    to_huggingface(merged, tmp_path / "merged")
    texts += further_stations(tmp_path / "merged", merged, tmp_path)
    assert texts == [TEXT[len(PROMPT) :][: len(texts[0])]] * 4


def test_by_recurra_train(published, tmp_path):
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text(TEXT * 40)
    data = {"path": str(tmp_path / "text"), "cache": str(tmp_path / "cache"), "batch_size": 4, "segment_length": 64}
    content = {
        "experiment": "text",
        "init_from": str(published),
        "data": {**data, "vocabulary": "bpe", "tokenizer": str(published / "tokenizer.json")},
        "model": SHAPE,
        "lora": {"rank": 8},
        "optimizer": {"learning_rate": 0.05, "weight_decay": 0.0},
        "schedule": {"warmup_steps": 10},
        "training": {"epochs": 15, "tensorboard": False, "accelerator": "cpu"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    trainer = start_run(tmp_path / "recipe.yaml", tmp_path / "run")
    trainer.fit(quiet())
    run = open_run(tmp_path / "run", checkpoint="last")
    merged = PortableModel(run.model, run.tokenizer)
    texts = [of_recurra(PortableModel(trainer.model, run.tokenizer)), of_recurra(merged)]
    convert_model(tmp_path / "run", tmp_path / "merged", "published", checkpoint="last")
    texts += further_stations(tmp_path / "merged", merged, tmp_path)
    assert texts == [TEXT[len(PROMPT) :][: len(texts[0])]] * 4
