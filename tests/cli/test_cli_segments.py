"""The command line over families of recipes and models of segments."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import failure, write_corpus

from recurra.cli import main

FAMILY = """
common:
  data: {batch_size: 2, segment_length: 4, bptt_segments: 2}
  model: {n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8, cutoffs: [3]}
  training: {max_steps: 4, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
axes:
  model:
    xl: {experiment: text-transformer-xl}
    crt: {experiment: text-crt}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a corpus, a family of recipes, and a finished run of each of its rows where it is looked for."""
    folder = tmp_path_factory.mktemp("segments")
    (folder / "recipes" / "toy").mkdir(parents=True)
    write_corpus(folder / "corpus", *(" the cat sat on a mat \n" * n_lines for n_lines in (12, 3, 4)))
    (folder / "recipes" / "toy" / "family.yaml").write_text(FAMILY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for row in ("xl", "crt"):
            word = f"recipes/toy/family.yaml#{row}"
            assert main(["train", word, "--data.path", str(folder / "corpus")]) == 0
    return folder


@pytest.fixture(autouse=True)
def there(monkeypatch, workplace):
    monkeypatch.chdir(workplace)


def scores(run: str, file: str = "eval-test.json") -> dict:
    return json.loads((Path(run) / file).read_text())


def test_eval_reports_lengths_and_no_accuracy(capsys):
    assert main(["eval", "runs/toy-xl"]) == 0
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert "accuracy" not in printed
    found = scores("runs/toy-xl")
    assert (found["segment_length"], found["mem_len"], found["changes"]) == (4, 4, {})
    assert found["n_targets"] == 4 * 7 - 1


def test_other_lengths_are_scored_apart(capsys):
    assert main(["eval", "runs/toy-xl"]) == 0
    before = scores("runs/toy-xl")
    assert main(["eval", "runs/toy-xl", "--data.segment_length", "3", "--model.mem_len", "9"]) == 0
    other = scores("runs/toy-xl", "eval-test-segment_length-3-mem_len-9.json")
    assert (other["segment_length"], other["mem_len"]) == (3, 9)
    assert other["changes"] == {"data.segment_length": 3, "model.mem_len": 9}
    assert other["loss"] != before["loss"]
    assert scores("runs/toy-xl") == before
    assert main(["eval", "runs/toy-crt", "--data.segment_length", "27"]) == 0
    assert scores("runs/toy-crt", "eval-test-segment_length-27.json")["segment_length"] == 27


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.segment_length", "0"], "segment_length"),
        (["--model.mem_len", "-1"], "mem_len is -1; expected at least 0"),
        (["--model.cutoffs", "[5, 3]"], "cutoffs is [5, 3]; expected increasing numbers"),
        (["--model.cutoffs", "[300]"], "cutoffs is [300]; expected increasing numbers from 1 to"),
        (["--model.n_layer", "2"], "is a checkpoint of another model"),
        (["--checkpoint", "runs/toy-crt/checkpoints/best.safetensors"], "is a checkpoint of another model"),
    ],
)
def test_bad_input_is_named(capsys, words, message):
    assert message in failure(capsys, "eval", "runs/toy-xl", *words)
