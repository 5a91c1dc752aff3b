"""The data of a run over a corpus that is turned into shards: made once, and documents that are packed end to end."""

import json

import pytest

from recurra.data.prepare import Preparation, prepare
from recurra.train._start import resume_run, start_run
from recurra.train.run import open_run

RECIPE = """
experiment: text
data: {{path: {path}, cache: {cache}, source: {source}, batch_size: 2, segment_length: 6{more}}}
model: {{n_layer: 1, d_model: 8, d_channel_mixing: 0, mixer: {mixer}}}
training: {{max_steps: {steps}, epochs: 9, tensorboard: false, accelerator: cpu, threads: 1, save_every: 1}}
"""


def write_recipe(folder, **given):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(**{"cache": folder / "cache", "more": "", "mixer": "min-gru", "steps": 2, **given}))
    return path


def test_a_run_reads_the_shards_that_it_began_with(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra data: pip install recurra[data]")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split in ("train", "validation", "test"):
        rows = (json.dumps({"text": f"w{i} w{i % 3} w{i % 5}"}) for i in range(40))
        (corpus / f"{split}-0.jsonl").write_text("\n".join(rows))
    recipe = write_recipe(tmp_path, path=corpus, source="jsonl")
    start_run(recipe, tmp_path / "run").fit()
    resume_run(tmp_path / "run", overrides=["--training.max_steps", "3"]).fit()
    assert open_run(tmp_path / "run").data.tokens("test") is not None
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("mixer", ["min-gru", "rotary-attention"])
def test_a_run_on_packed_documents_resumes(tmp_path, mixer):
    """Documents that have ended leave no state, whose form would depend on their lengths."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        lines = (" ".join(f"w{(i + j) % 7}" for j in range(2 + i % 4)) for i in range(60))
        (corpus / f"{split}.txt").write_text("\n".join(lines) + "\n")
    prepare(Preparation("folder", str(corpus), tmp_path / "shards"))
    more = ", sampling: packed"
    recipe = write_recipe(tmp_path, path=tmp_path / "shards", source="shards", more=more, mixer=mixer)
    first = start_run(recipe, tmp_path / "run")
    first.fit()
    assert first.snapshot()["state"] is None
    again = resume_run(tmp_path / "run", overrides=["--training.max_steps", "3"])
    again.fit()
    assert again.position.step == 3
