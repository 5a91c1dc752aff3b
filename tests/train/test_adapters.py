"""Fine-tuning adapters on a published Mamba: small checkpoints, exact resuming, merged weights wherever it is read."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tests.train.conftest import quiet

from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.data.tokenizers import BytePairEncoding
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train.adapters import Adapters, LoraConfig
from recurra.train.checkpoint import load_checkpoint
from recurra.train.formats import convert_model
from recurra.train.recipe import load_recipe
from recurra.train.run import open_run, resume_run, start_run

pytest.importorskip("peft")
TEXT = "a cat and a dog\nthe dog saw a cat\n" * 30
SHAPE = {
    **{"n_layer": 2, "d_model": 8, "d_channel_mixing": 0, "mixer": "mamba", "norm": "rms", "biases": False},
    **{"tie_embeddings": True, "mixer_options": {"d_state": 4, "d_conv": 3, "expand": 2, "dt_rank": 2}},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A published model, as transformers has it."""
    tokenizer = BytePairEncoding.train([TEXT], 260)
    model = LanguageModel(LanguageModelConfig(len(tokenizer), None, **SHAPE))
    folder = tmp_path_factory.mktemp("published") / "mamba"
    to_huggingface(PortableModel(model, tokenizer), folder)
    return folder


@pytest.fixture
def recipe(published, tmp_path) -> Path:
    """A recipe for a copy of it, which lies beside the recipe."""
    shutil.copytree(published, tmp_path / "mamba")
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text(TEXT)
    data = {"path": str(tmp_path / "text"), "cache": str(tmp_path / "cache"), "batch_size": 2, "segment_length": 8}
    data |= {"vocabulary": "bpe", "tokenizer": str(tmp_path / "mamba" / "tokenizer.json")}
    content = {
        "experiment": "text",
        "init_from": str(tmp_path / "mamba"),
        "data": data,
        "model": SHAPE,
        "lora": {"rank": 2, "dropout": 0.1},
        "optimizer": {"learning_rate": 0.05},
        "training": {"max_steps": 3, "save_every": 1, "tensorboard": False, "accelerator": "cpu"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "recipe.yaml"


def loss_of(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().loss(tokens[:, :-1], tokens[:, 1:])[0]


def test_a_run_of_adapters_from_a_published_model_to_one(recipe, tmp_path):
    base = from_huggingface(tmp_path / "mamba").model
    convert_model(tmp_path / "mamba", tmp_path / "base", "run")
    trainer = start_run(recipe, tmp_path / "run", ["--init_from", str(tmp_path / "base")])
    assert "step 0; trains 432 of 4,008 parameters (10.78%), in adapters on 8 layers" in trainer.begin()
    trainer.fit(quiet())
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if ".lora_" not in name or not p.any()] == []
    found = {name.replace(".base_layer", ""): weight for name, weight in trainer.model.named_parameters()}
    assert [name for name, weight in base.named_parameters() if not torch.equal(found[name], weight)] == []

    last = load_checkpoint(tmp_path / "run/checkpoints/step-0000000003.safetensors")
    assert last["model"].keys() == trained.keys()
    resumed = resume_run(tmp_path / "run", checkpoint="previous")
    assert resumed.position.step == 2
    resumed.fit(quiet())
    again = load_checkpoint(tmp_path / "run/checkpoints/step-0000000003.safetensors")
    assert all(torch.equal(again["model"][name], last["model"][name]) for name in trained)

    tokens = torch.randint(len(base.embedding.weight), (2, 9))
    run = open_run(tmp_path / "run", checkpoint="last")
    assert run.model.state_dict().keys() == base.state_dict().keys()
    assert all(parameter.requires_grad for parameter in run.model.parameters())  # merged, it is a model like any other
    expected = loss_of(trainer.model, tokens)
    assert not torch.allclose(loss_of(base, tokens), expected, rtol=1e-3)
    torch.testing.assert_close(loss_of(run.model, tokens), expected)  # both in float32: sums in another order
    for to in ("run", "published"):
        convert_model(tmp_path / "run", merged := tmp_path / f"merged-{to}", to, checkpoint="last")
        model = open_run(merged).model if to == "run" else from_huggingface(merged).model
        torch.testing.assert_close(loss_of(model, tokens), loss_of(run.model, tokens))


def test_the_weights_below_adapters_may_move_but_not_change(recipe, tmp_path):
    start_run(recipe, tmp_path / "run", ["--training.max_steps=1"]).fit(quiet())
    moved = ["--init_from", str((tmp_path / "mamba").rename(tmp_path / "moved"))]
    run = open_run(tmp_path / "run", overrides=moved)
    assert run.changes == {}
    model = run.model
    resume_run(tmp_path / "run", overrides=[*moved, "--training.max_steps=2"]).fit(quiet())  # config.yaml knows it now
    with torch.no_grad():
        model.norm.weight.add_(1)
    to_huggingface(PortableModel(model, run.tokenizer), tmp_path / "moved")
    for use in (lambda: open_run(tmp_path / "run").model, lambda: resume_run(tmp_path / "run")):
        with pytest.raises(ValueError, match="init_from is other weights; expected those that the adapters in"):
            use()
    again = ["--init_from", str(tmp_path / "run"), "--data.tokenizer", str(tmp_path / "run" / "tokenizer.json")]
    with pytest.raises(ValueError, match="is a checkpoint of adapters alone; expected one of whole weights: merge"):
        start_run(recipe, tmp_path / "next", again)


def test_targets_are_names_of_linear_layers(monkeypatch):
    model = LanguageModel(LanguageModelConfig(11, 11, **SHAPE))
    known = "input_projection, selection, step_projection, output_projection"
    for word in ("wrong", "head", "embedding", "jection"):  # the head is the embedding
        with pytest.raises(ValueError, match=f"lora.target_modules is {word}; expected linear layers: {known}$"):
            Adapters(model, LoraConfig(2, target_modules=["selection", word]))
    assert Adapters(model, LoraConfig(2, target_modules="selection")).targets == [
        f"blocks.{n}.mixer.selection" for n in range(2)
    ]
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'^peft is missing: pip install "recurra\[hf\]"$'):
        Adapters(model, LoraConfig(2))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--init_from=null", "init_from is None; expected the weights that the adapters of lora.rank adapt"),
        ("--training.strategy=fsdp", "training.strategy is 'fsdp'; expected ddp with lora.rank"),
        ("--lora.rank=null", "lora.rank is None; expected the rank of the adapters that the other keys"),
        ("--lora.rank=0", "lora.rank is 0; expected at least 1"),
    ],
)
def test_what_adapters_do_not_fit_is_refused(recipe, override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, [override])
