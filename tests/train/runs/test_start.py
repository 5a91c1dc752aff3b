"""Starting and resuming runs from Python."""

import shutil
from pathlib import Path

import pytest
from tests.train.runs.conftest import RECIPES

from recurra.data._prepare import Preparation, prepare
from recurra.train.recipe import find_recipe, read_family, recipe_names
from recurra.train.run import default_run_folder, resume_run, start_run


def test_no_two_recipes_share_a_default_folder():
    words = []
    for name in recipe_names():
        file = str(find_recipe(name))
        is_family = "\naxes:" in Path(file).read_text()
        words += [f"{file}#{variant}" for variant in read_family(name).variants] if is_family else [file]
    folders = [str(default_run_folder(word)) for word in words]
    assert len(folders) > 100
    assert sorted(folders) == sorted(set(folders))


@pytest.mark.parametrize(
    ("own", "words", "suffix"),
    [
        ("gateloop", ["--model.mixer=gateloop", "--model.d_model", "8"], ""),
        ("gateloop", ["--model.mixer", "s5", "--model.mixer", "gru"], "-gru"),
        ("gateloop", ["--model.mixer=[s5, gru]"], "-s5-gru"),
        ("gateloop", ["--model", '{"mixer": "gru"}'], "-gru"),
        ("[gateloop, gru]", ["--model.mixer=[gateloop,  gru]"], ""),
        ("[gateloop, gru]", ["--model.mixer=gateloop"], "-gateloop"),
    ],
)
def test_a_default_folder_names_another_mixer(own, words, suffix, tmp_path, monkeypatch):
    """Of a recipe whose data the command line gives."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(f"experiment: text\ndata: {{segment_length: 4}}\nmodel: {{n_layer: 2, mixer: {own}}}\n")
    for split in ("train", "valid", "test"):
        Path(f"{split}.txt").write_text("a b c a b d\n" * 20)
    trainer = start_run("r.yaml", overrides=["--data.path=.", f"--data.cache={tmp_path}", *words])
    trainer.folder.unlock()
    assert trainer.folder.path == Path("runs", f"{tmp_path.name}-r{suffix}")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPES["horizon"])
    return path


def test_one_process_at_a_time_trains_a_run(recipe, tmp_path):
    folder = tmp_path / "run"
    first = start_run(recipe, folder)
    with pytest.raises(BlockingIOError, match=r"run is .*run, which process \d+ on .* trains"):
        resume_run(folder)
    first.fit()
    resumed = resume_run(folder, overrides=["--training.max_steps", "3"])
    with pytest.raises(BlockingIOError):
        resume_run(folder)
    resumed.fit()


def test_two_first_trainings_that_begin_at_once_do_not_share_a_folder(recipe, tmp_path, monkeypatch):
    """The second looks into the folder before the first writes to it, and is slower."""
    folder, first = tmp_path / "run", []

    def begin(trainer):
        if not first:
            first.append(None)
            first[0] = start_run(recipe, folder)
        return ""

    monkeypatch.setattr("recurra.train.loop.Trainer.begin", begin)
    with pytest.raises(BlockingIOError):
        start_run(recipe, folder)
    first[0].fit()


def test_a_run_that_cannot_resume_is_not_kept_locked(recipe, tmp_path):
    folder = tmp_path / "run"
    start_run(recipe, folder).fit()
    for _ in range(2):
        with pytest.raises(ValueError, match="learning_rate"):
            resume_run(folder, overrides=["--optimizer.learning_rate", "1"])


def _shards(corpus: Path) -> Path:
    out = corpus.with_name(f"{corpus.name}-shards")
    prepare(Preparation("folder", str(corpus), out))
    return out


@pytest.mark.parametrize(("source", "made"), [("folder", Path), ("shards", _shards)])
def test_a_run_resumes_on_a_moved_text_but_not_on_a_changed_one(tmp_path, source, made):
    """Even if only two words were swapped, which the vocabulary does not show."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text("the cat sat on a mat\na cat on the mat\n" * 8)
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    settings = f"path: {made(corpus)}, source: {source}, batch_size: 2, segment_length: 4, cache: {tmp_path / 'cache'}"
    recipe.write_text(f"""
experiment: text
data: {{{settings}}}
model: {{n_layer: 1, d_model: 8, mixer: min-gru}}
training: {{max_steps: 1, tensorboard: false, accelerator: cpu, threads: 1}}
""")
    start_run(recipe, run).fit()
    copies = [Path(shutil.copytree(corpus, tmp_path / name)) for name in ("moved", "changed", "valid")]
    for copy, split in zip(copies[1:], ("train", "valid")):
        file = copy / f"{split}.txt"
        file.write_text(file.read_text().replace("cat sat", "sat cat", 1))
    moved, *changed = (["--data.path", str(made(copy)), "--training.max_steps", "2"] for copy in copies)
    for overrides in changed:
        refused = (
            rf"^the corpus is {overrides[1]}, which has changed since .*step-0000000001.* was saved; expected the d"
        )
        with pytest.raises(ValueError, match=refused):
            resume_run(run, overrides=overrides)
    resume_run(run, overrides=moved).fit()


def test_a_run_without_checkpoints_resumes_with_its_own_settings(recipe, tmp_path):
    start_run(recipe, tmp_path / "run").folder.unlock()  # killed before its first checkpoint
    with pytest.raises(ValueError, match=r"not that of the checkpoint in model.d_model"):
        resume_run(tmp_path / "run", overrides=["--model.d_model", "16"])
    assert resume_run(tmp_path / "run", overrides=["--training.log_every", "3"]).position.step == 0


@pytest.mark.parametrize("mixer", ["min-gru", "rotary-attention"])
def test_a_run_on_packed_documents_resumes(tmp_path, mixer):
    """Documents that have ended leave no state, whose form would depend on their lengths."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        lines = (" ".join(f"w{(i + j) % 7}" for j in range(2 + i % 4)) for i in range(60))
        (corpus / f"{split}.txt").write_text("\n".join(lines) + "\n")
    prepare(Preparation("folder", str(corpus), tmp_path / "shards"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
experiment: text
data: {{path: {tmp_path / "shards"}, source: shards, sampling: packed, batch_size: 2, segment_length: 6}}
model: {{n_layer: 1, d_model: 8, d_channel_mixing: 0, mixer: {mixer}}}
training: {{max_steps: 2, epochs: 9, tensorboard: false, accelerator: cpu, threads: 1, save_every: 1}}
""")
    first = start_run(recipe, tmp_path / "run")
    first.fit()
    assert first.snapshot()["state"] == {}
    again = resume_run(tmp_path / "run", overrides=["--training.max_steps", "3"])
    again.fit()
    assert again.position.step == 3
