"""The models that come with Recurra: their files, how they are found by name, and what commands do with them."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from recurra import open_run
from recurra.cli import main
from recurra.convert.portable import PortableModel, load_single_file, save_single_file
from recurra.models import LanguageModel, LanguageModelConfig
from recurra.models.shell import negative_log_likelihood
from recurra.train.shipped import find_run, shipped_file, shipped_models

NAMES = sorted(shipped_models())
PASSAGE = """\
The Time Traveller (for so it will be convenient to speak of him) was expounding a recondite matter to us. His pale \
grey eyes shone and twinkled, and his usually pale face was flushed and animated. The fire burnt brightly, and the \
soft radiance of the incandescent lights in the lilies of silver caught the bubbles that flashed and passed in our \
glasses.
"You must follow me carefully. I shall have to controvert one or two ideas that are almost universally accepted. The \
geometry, for instance, they taught you at school is founded on a misconception."
"Is not that rather a large thing to expect us to begin upon?" said Filby, an argumentative person with red hair.
"""
"""From The Time Machine, which is in the test split of recipes/books."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A run of two updates on Memory Horizon."""
    folder = tmp_path_factory.mktemp("tiny")
    words = ["demo/data-controlled", "--run-dir", str(folder / "run"), "--training.max_steps", "2"]
    words += ["--data.n_samples", "60", "--training.tensorboard", "false", "--training.threads", "1"]
    assert main(["train", *words]) == 0
    return folder / "run"


def bits_per_byte(model: nn.Module, tokenizer) -> float:
    tokens = torch.tensor(tokenizer.encode(PASSAGE))[None]
    with torch.no_grad():
        logits, _ = model(tokens[:, :-1])
    nats = nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()
    return nats / len(PASSAGE.encode()) / 0.6931


def stated(card: str, what: str) -> float:
    return float(re.search(rf"{what}[^\d]*([\d.]+\d)", card)[1])


def test_the_index_lists_the_files_and_says_what_is_in_them():
    files = shipped_file("any").parent.glob("*.safetensors")
    assert sorted(path.stem for path in files) == NAMES
    for name, about in shipped_models().items():
        run, file = open_run(name), shipped_file(name)
        card = file.with_suffix(".md").read_text(encoding="utf-8")
        assert about["bytes"] == file.stat().st_size < 4_200_000
        assert about["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
        assert about["mixer"] == run.experiment.model.mixer
        assert f"{about['parameters']:,} parameters ({about['bytes']:,} bytes" in card
        assert f"{run.step:,} updates" in card
        assert "/" not in str(getattr(run.experiment.data, "path", "")).removeprefix("data/")  # of no machine


@pytest.mark.parametrize("name", NAMES)
def test_a_name_opens_the_model_in_the_file(name):
    run, portable = open_run(name), load_single_file(shipped_file(name))
    assert run.name == name
    assert run.folder.path == find_run(name)
    weights = portable.model.state_dict()
    for parameter, value in run.model.state_dict().items():
        assert value.dtype != torch.int8
        assert torch.equal(value, weights[parameter]), parameter
    if portable.tokenizer is not None:
        assert run.tokenizer.decode(run.tokenizer.encode(PASSAGE)) == PASSAGE


def test_the_text_model_predicts_a_passage_as_well_as_its_card_says():
    run = open_run("books")
    card = shipped_file("books").with_suffix(".md").read_text(encoding="utf-8")
    said = stated(card, "On the opening of The Time Machine")
    assert bits_per_byte(run.model, run.tokenizer) == pytest.approx(said, abs=0.02)


def test_generating_is_decided_by_the_seed(capsys):
    def text(seed: int) -> str:
        assert main(["generate", "books", "--prompt", "It was", "--max-tokens", "12", "--seed", str(seed)]) == 0
        return capsys.readouterr().out

    first = text(1)
    assert len(first.split()) > 2
    assert text(1) == first
    assert text(2) != first


def test_a_run_of_that_name_wins_and_is_named(tiny, empty_folder):
    folder = empty_folder / "books"
    folder.mkdir()
    assert open_run("books").experiment.experiment == "text"  # no run: a folder of books, perhaps
    shutil.copytree(tiny, empty_folder / "runs" / "books")
    with pytest.warns(UserWarning, match=r"^books is the run in .*runs/books, not the model that comes with Recurra$"):
        assert find_run("books") == Path("runs/books")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="^books is the run in"):
        assert find_run("books") == Path("books")


def test_runs_have_names_too(tiny, empty_folder):
    shutil.copytree(tiny, empty_folder / "runs" / "first-try")
    with pytest.warns(UserWarning, match=r"^first-try is the run in runs/first-try$"):
        assert open_run("first-try").step == 2
    with pytest.raises(FileNotFoundError, match=r"did you mean first-try\?$"):
        find_run("first-tri")


def test_names_are_enough_to_resume_and_to_count(tiny, empty_folder, capsys):
    shutil.copytree(tiny, empty_folder / "runs" / "first-try")
    with pytest.warns(UserWarning, match="^first-try is the run in"):
        assert main(["cost", "first-try", "--json"]) == 0
    assert '"name": "first-try"' in capsys.readouterr().out
    with pytest.warns(UserWarning, match="^first-try is the run in"):
        assert main(["train", "--resume", "first-try"]) == 0
    assert "run folder: runs/first-try" in capsys.readouterr().out
    assert main(["train", "--resume", "books"]) == 2  # it has no optimiser's state
    assert "expected a checkpoint that training can continue from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "near"),
    [("boks", r"mean books\?"), ("memory_horizon", r"mean memory-horizon\?"), ("x", "`recurra models` lists")],
)
@pytest.mark.parametrize("command", ["generate", "info", "explore"])
def test_unknown_names_are_refused_with_a_hint(command, name, near, capsys):
    assert main([command, name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(rf"^recurra {command}: run is {name}, which does not exist; expected .*{near}", captured.err)
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        open_run("./books")  # a path is no name


def test_models_and_their_cards_are_shown(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *NAMES]
    assert main(["info", "books"]) == 0
    said = capsys.readouterr().out
    assert shipped_file("books").with_suffix(".md").read_text(encoding="utf-8").rstrip() in said
    assert re.search(rf"^parameters +{shipped_models()['books']['parameters']:,}$", said, flags=re.MULTILINE)


@pytest.mark.parametrize(("words", "opened"), [([], "books"), (["memory-horizon"], "memory-horizon")])
def test_the_explorer_opens_a_model_by_its_name(words, opened, monkeypatch, capsys):
    pytest.importorskip("fastapi", reason="needs the extra serve: pip install recurra[serve]")
    from recurra.serve._app import _load_model

    served = []
    monkeypatch.setattr("recurra.cli.serve.serve_runs", lambda runs, settings, *_: served.append((runs, settings)) or 0)
    assert main(["explore", *words, "--no-browser"]) == 0
    assert ("opening books" in capsys.readouterr().out) == (not words)
    [(runs, settings)] = served
    assert runs == [opened]
    assert settings.sessions_file == find_run(opened) / "sessions.sqlite"
    model = _load_model(opened, None, "best", [])
    assert model.name == opened
    assert model.task["kind"] == ("text" if opened == "books" else opened)


def test_a_model_is_converted_and_exported_by_its_name(empty_folder, capsys):
    assert main(["convert", "books", "books.safetensors"]) == 0
    whole = load_single_file("books.safetensors").model.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in open_run("books").model.state_dict().items())
    pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")
    assert main(["export", "web", "memory-horizon", "page"]) == 0
    assert (empty_folder / "page" / "engine.json").is_file()


def test_int8_costs_next_to_nothing_and_rounding_twice_nothing(tmp_path):
    """Rounding takes a weight by at most half a step, the 127th part of the largest in its row."""
    config = LanguageModelConfig(vocab_size=50, n_layer=2, d_model=32, tie_embeddings=True)
    model, files = LanguageModel(config).eval(), [tmp_path / "once.safetensors", tmp_path / "twice.safetensors"]
    with torch.no_grad():
        model.embedding.weight[3] = 0  # a row without a scale
    save_single_file(PortableModel(model, None, {}, 0), files[0], int8=True)
    restored = load_single_file(files[0]).model
    save_single_file(PortableModel(restored, None, {}, 0), files[1], int8=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert restored.head.weight is restored.embedding.weight
    for name, value in model.state_dict().items():
        step = value.abs().amax(-1, keepdim=True) / 127 if value.ndim == 2 else torch.zeros(())
        assert ((restored.state_dict()[name] - value).abs() <= 0.5001 * step).all(), name
    tokens = torch.randint(50, (4, 65))
    losses = [negative_log_likelihood(each(tokens[:, :-1])[0], tokens[:, 1:]).mean() for each in (model, restored)]
    assert torch.exp(losses[1] - losses[0]).item() == pytest.approx(1, abs=0.01)


def test_a_copy_that_lost_its_weights_is_written_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = find_run("memory-horizon")
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.unlink()
    assert open_run("memory-horizon").model is not None


def test_only_matrices_of_layers_are_rounded(tmp_path):
    config = LanguageModelConfig(vocab_size=7, n_layer=1, d_model=8, mixer="s4d", mixer_options={"d_state": 4})
    model = LanguageModel(config)
    save_single_file(PortableModel(model, None), tmp_path / "model.safetensors", int8=True)
    found = load_single_file(tmp_path / "model.safetensors").model.state_dict()
    frequency = "blocks.0.mixer.frequency"
    assert torch.equal(found[frequency], model.state_dict()[frequency])
    assert not torch.equal(found["embedding.weight"], model.embedding.weight)
