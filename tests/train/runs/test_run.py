"""A run as one object: what it loads, when, and what it refuses."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import recurra
from recurra.data.text import TextConfig
from recurra.train.checkpoint import CheckpointError
from recurra.train.run import Run, open_run, score_run

LAZY = {"_loaded", "tokenizer", "class_names", "data", "scores", "changes"}


def loaded(run: Run) -> set[str]:
    return LAZY & vars(run).keys()


def copy_of(run: str, folder: Path) -> Path:
    return Path(shutil.copytree(Path("runs") / run, folder / run))


@pytest.mark.parametrize("name", ["text", "video"])
def test_opening_loads_nothing_but_the_configuration(there, name, tmp_path):
    copy = copy_of(name, tmp_path)
    shutil.rmtree(copy / "checkpoints")
    run = recurra.open_run(copy)
    assert loaded(run) == set()
    assert (run.name, run.folder.path) == (name, copy)
    assert run.experiment.training.max_steps == 2
    with pytest.raises(CheckpointError, match="which does not exist"):
        _ = run.model


def test_a_text_run_needs_no_corpus_and_a_video_run_no_videos(there, tmp_path):
    moved = "--data.path", str(tmp_path / "nowhere")
    text = open_run("runs/text", overrides=moved)
    assert text.tokenizer.decode(text.tokenizer.encode("the cat")) == "the cat"
    assert text.model.config.vocab_size == len(text.tokenizer) == 8
    assert "data" not in loaded(text)
    video = open_run("runs/video", overrides=moved)
    assert len(video.class_names) == 4
    assert video.model.config.n_classes == 4
    assert "data" not in loaded(video)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _ = text.data


def renamed_corpus(folder: Path) -> Path:
    """The corpus with another word in the training file: as many words, and not one under its number."""
    (folder / "corpus").mkdir()
    for file in Path("corpus").glob("*.txt"):
        text = file.read_text()
        (folder / "corpus" / file.name).write_text("a the a the mat\n" + text if file.name == "train.txt" else text)
    return folder / "corpus"


def test_a_text_is_read_with_the_vocabulary_of_the_run(there, tmp_path):
    """Another training file makes as many words under other numbers, which would fit the model."""
    run, moved = open_run("runs/text"), ["--data.path", str(renamed_corpus(tmp_path))]
    other = TextConfig(path=moved[1]).build().corpus.encoder
    assert len(other) == len(run.tokenizer)
    assert other.fingerprint != run.tokenizer.fingerprint
    data = open_run("runs/text", overrides=moved).data
    assert data.corpus.encoder.fingerprint == run.tokenizer.fingerprint
    np.testing.assert_array_equal(data.tokens("test"), run.data.tokens("test"))
    expected = score_run(run)
    assert score_run(open_run("runs/text", overrides=moved))["loss"] == expected["loss"]


def test_another_vocabulary_and_other_classes_are_refused(there, tmp_path):
    run, other = open_run("runs/text"), tmp_path / "other.json"
    TextConfig(path=str(renamed_corpus(tmp_path))).build().corpus.encoder.save(other)
    words = ["--data.tokenizer", str(other)]
    with pytest.raises(
        ValueError, match=r"data.tokenizer is .*other.json, another vocabulary; expected that in .*text"
    ):
        _ = open_run("runs/text", overrides=words).data
    words = ["--data.tokenizer", str(run.folder.tokenizer)]
    assert open_run("runs/text", overrides=words).data.vocab_size == 8
    assert open_run("runs/text", overrides=words).changes == {}
    video = copy_of("video", tmp_path)
    names = (video / "classes.txt").read_text().splitlines()
    (video / "classes.txt").write_text("".join(f"{name}\n" for name in reversed(names)))
    with pytest.raises(ValueError, match=r"data.path is videos of other classes; expected those in .*classes.txt"):
        _ = open_run(video).data


def edited(run: Path, before: str, after: str) -> Path:
    text = (run / "config.yaml").read_text()
    assert before in text
    (run / "config.yaml").write_text(text.replace(before, after))
    return run


def test_a_config_of_another_model_than_the_checkpoint_is_refused(there, tmp_path):
    """Its weights would fit: only the sizes are in them."""
    copy = edited(copy_of("text", tmp_path), "dropout: 0.0\ninit_from", "dropout: 0.5\ninit_from")
    with pytest.raises(
        ValueError, match=r"config.yaml is not .*best.safetensors in model.dropout \(was 0.0, now 0.5\); expected"
    ):
        _ = open_run(copy).model
    assert open_run("runs/text", overrides=["--model.dropout", "0.5"]).model.config.dropout == 0.5  # on purpose
    copy = edited(copy_of("horizon", tmp_path), "warmup_steps: ", "warmup_steps: 1")
    assert open_run(copy).step == 2  # how it was trained is no part of the model
