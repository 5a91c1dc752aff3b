"""`recurra report` from outside: runs, summaries, the page."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recurra.cli import main
from recurra.runs.summary import read_summary
from recurra.runs.training_command import training_command
from recurra.training import load_recipe

HORIZON = """
experiment: memory-horizon
data: {n_samples: 40, sequence_length: 24, batch_size: 8, resets_per_sample: 2, modulus: 7}
model:
  n_layer: 2
  d_model: 8
  d_channel_mixing: 16
  dropout: 0.1
  mixer_options: {d_qk: 8, d_v: 8, n_heads: 8, transition: data}
schedule: {warmup_steps: 4}
training: {epochs: 3, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1, monitor: accuracy}
"""
FAMILY = """
common:
  data: {path: data/toy, batch_size: 2, segment_length: 4, bptt_segments: 2}
  model: {n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}
  training: {max_steps: 4, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
axes:
  model:
    xl: {experiment: text-transformer-xl}
    crt: {experiment: text-crt}
published:
  crt: {test_perplexity: 61.04}
  xl: {test_perplexity: 66.9}
"""
PAGE = """
{{ horizon_table(summaries(experiment="memory-horizon")) }}
{{ family_table("toy/family.yaml", summaries(experiment="text-*")) }}
{{ curves_figure(summaries(), "curves", "Curves") }}
{{ span_figure(summaries("h*"), "spans", "Spans") }}
{{ gates_figure(run("horizon"), "gates", "Gates") }}
{{ flops_figure(summaries(experiment="text-*"), "flops", "FLOPs") }}
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Runs set the number of threads of this process; put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with recipes and two finished, scored runs."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "recipes" / "toy").mkdir(parents=True)
    (folder / "recipes" / "toy" / "horizon.yaml").write_text(HORIZON)
    fixed = HORIZON.replace("transition: data", "transition: fixed").replace("n_layer: 2", "n_layer: 1")
    (folder / "recipes" / "toy" / "fixed.yaml").write_text(fixed)
    (folder / "recipes" / "toy" / "family.yaml").write_text(FAMILY)
    (folder / "corpus").mkdir()
    for split, n_lines in (("train", 12), ("valid", 3), ("test", 4)):
        (folder / "corpus" / f"{split}.txt").write_text(" the cat sat on a mat \n" * n_lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        faster = ["--optimizer.learning_rate", "0.01"]
        assert main(["train", "recipes/toy/horizon.yaml", "--run", "runs/horizon", *faster]) == 0
        words = ["recipes/toy/family.yaml#crt", "--data.path", str(folder / "corpus")]
        assert main(["train", *words]) == 0
        for run in ("runs/horizon", "runs/toy-crt"):
            assert main(["eval", run]) == 0
        assert main(["eval", "runs/toy-crt", "--data.segment_length", "2"]) == 0
    return folder


@pytest.fixture
def there(monkeypatch, workplace, tmp_path) -> Path:
    """A page's folder, called from beside the recipes and runs."""
    monkeypatch.chdir(workplace)
    folder = tmp_path / "docs" / "results"
    (folder / "sections").mkdir(parents=True)
    (folder / "sections" / "01-page.md.jinja").write_text("# Page\n")
    return folder


def failure(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["report", *words]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("recurra report: ")
    return captured.err


def log(run: str) -> list[dict[str, str]]:
    with (Path(run) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_on_memory_horizon_is_added(there, capsys):
    assert main(["report", str(there), "--add", "runs/horizon"]) == 0
    summary = read_summary(there / "summaries" / "horizon.json")
    assert capsys.readouterr().out.split() == [str(there / "summaries" / "horizon.json"), str(there.with_suffix(".md"))]
    assert summary.command == (
        "recurra train recipes/toy/horizon.yaml --optimizer.learning_rate 0.01 --run runs/horizon"
    )
    assert (summary.finished, summary.steps, summary.total_steps, summary.epochs) == (True, 12, 12, 3.0)
    assert (summary.unit, summary.count, summary.resumed_at) == ("tokens", 3 * 32 * 24, [])
    written = json.loads(Path("runs/horizon/summary.json").read_text())
    assert summary.parameters == written["parameters"]
    assert summary.seconds == pytest.approx(written["seconds"], rel=0.2)
    assert summary.versions == written["versions"]
    assert summary.hardware == written["hardware"]
    assert summary.validation.keys() == {"best", "last"}
    for which, score in summary.validation.items():
        assert score == pytest.approx(written["validation"][which], rel=1e-5)
    scores = json.loads(Path("runs/horizon/eval-test.json").read_text())
    assert summary.score("accuracy") == pytest.approx(scores["accuracy"], rel=1e-5)
    rows = log("runs/horizon")
    assert summary.curve["step"] == [int(row["step"]) for row in rows]
    assert summary.curve["train_loss"] == pytest.approx([float(row["train_loss"]) for row in rows], rel=1e-5)
    measured = [(row["step"], row["valid_loss"]) for row in rows if row["valid_loss"]]
    kept = [pair for pair in zip(summary.curve["step"], summary.curve["valid_loss"]) if pair[1] is not None]
    assert [step for step, _ in kept] == [int(step) for step, _ in measured] == [4, 8, 12]


def test_spans_and_gates_are_those_of_the_test_split(there):
    assert main(["report", str(there), "--add", "runs/horizon"]) == 0
    summary = read_summary(there / "summaries" / "horizon.json")
    scores = json.loads(Path("runs/horizon/eval-test.json").read_text())
    assert sum(summary.spans["counts"]) == 4 * 24
    assert sum(summary.spans["n_correct"]) / (4 * 24) == pytest.approx(scores["accuracy"])
    data = load_recipe("runs/horizon/config.yaml").build_data()
    tokens = data.source("test").batch(0, 0).inputs[0].tolist()
    assert summary.gates["resets"] == [step for step, token in enumerate(tokens) if token == data.reset_token]
    assert len(summary.gates["resets"]) == 2
    assert summary.gates["layers"] == [0, 1]
    assert [len(means) for means in summary.gates["means"]] == [24, 24]
    assert all(0 < mean < 1 and mean == round(mean, 3) for means in summary.gates["means"] for mean in means)


def test_gates_that_do_not_change_are_left_out(there):
    assert main(["train", "recipes/toy/fixed.yaml", "--run", str(there / "fixed"), "--training.max_steps", "1"]) == 0
    assert main(["report", str(there), "--add", str(there / "fixed")]) == 0
    summary = read_summary(there / "summaries" / "fixed.json")
    assert summary.gates is None
    assert summary.spans is not None
    assert summary.command.startswith("recurra train recipes/toy/fixed.yaml --training.max_steps 1 ")
    assert (summary.finished, summary.epochs, summary.scores) == (True, 0.25, {})


def test_a_run_over_text_is_added_with_its_cost_and_without_its_places(there):
    assert main(["report", str(there), "--add", "runs/toy-crt"]) == 0
    summary = read_summary(there / "summaries" / "toy-crt.json")
    assert summary.command == "recurra train recipes/toy/family.yaml#crt --data.path FOLDER"
    assert summary.config["data"]["path"] == "corpus"
    assert (summary.spans, summary.gates) == (None, None)
    assert summary.scores.keys() == {"eval-test", "eval-test-segment_length-2"}
    assert main(["cost", "runs/toy-crt", "--json", str(there / "cost.json")]) == 0
    (row,) = json.loads((there / "cost.json").read_text())
    assert summary.cost["measured"] == row["measured"]
    assert summary.cost["segment_length"] == 4


def test_the_page_needs_the_summaries_alone(there, capsys, monkeypatch, workplace, tmp_path):
    (there / "sections" / "02-tables.md.jinja").write_text(PAGE)
    assert main(["report", str(there), "--add", "runs/horizon", "--add", "runs/toy-crt"]) == 0
    figures = there.parent / "figures"
    names = ["curves", "spans", "gates", "flops"]
    assert capsys.readouterr().out.split()[2:] == [
        *(str(figures / f"{name}.png") for name in names),
        str(there.with_suffix(".md")),
    ]
    page = there.with_suffix(".md").read_text()
    assert "| horizon | gateloop, data | 3 |" in page
    assert "| xl | 66.9 | not run |" in page
    assert "| crt | 61.0 | " in page
    files = {path: path.read_bytes() for path in [there.with_suffix(".md"), *figures.iterdir()]}
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(there), "--recipes", str(workplace / "recipes")]) == 0
    assert {path: path.read_bytes() for path in files} == files


def test_a_run_killed_and_resumed_has_the_curve_of_one_that_was_not(there, tmp_path, monkeypatch):
    """kill -9 in the middle; its summary says so before and after it goes on."""
    longer = ["--training.epochs", "15", "--training.save_every", "7"]
    assert main(["train", "recipes/toy/horizon.yaml", "--run", str(tmp_path / "whole"), *longer]) == 0
    command = [sys.executable, "-m", "recurra", "train", "recipes/toy/horizon.yaml", "--run", str(tmp_path / "cut")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *longer], stdout=subprocess.DEVNULL, env=environment)
    metrics = tmp_path / "cut" / "metrics.csv"
    while not (metrics.is_file() and metrics.read_text().count("\n") > 18):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL

    assert main(["report", str(there), "--add", str(tmp_path / "cut")]) == 0
    before = read_summary(there / "summaries" / "cut.json")
    assert (before.finished, before.total_steps, before.resumed_at) == (False, 60, [])
    assert 18 <= before.steps < 60
    assert before.epochs == pytest.approx(before.steps / 4)
    assert before.hardware["threads"] == 1
    assert before.count == before.steps * 8 * 24
    assert len(before.curve["step"]) == before.steps
    best = max((row for row in before.rows() if "valid_accuracy" in row), key=lambda row: row["valid_accuracy"])
    assert before.validation["best"]["step"] == best["step"]

    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    assert main(["report", str(there), "--add", str(tmp_path / "cut"), str(tmp_path / "whole")]) == 0
    after, whole = (read_summary(there / "summaries" / f"{name}.json") for name in ("cut", "whole"))
    assert after.finished
    assert len(after.resumed_at) == 1
    assert after.resumed_at[0] % 7 == 0
    assert 0 <= before.steps - after.resumed_at[0] < 8
    assert (after.curve, after.validation) == (whole.curve, whole.validation)
    assert (after.spans, after.gates, whole.resumed_at) == (whole.spans, whole.gates, [])


def test_a_run_of_no_recipe_is_trained_by_its_own_configuration(there, tmp_path):
    (tmp_path / "none").mkdir()
    assert main(["report", str(there), "--add", "runs/horizon", "--recipes", str(tmp_path / "none")]) == 0
    assert read_summary(there / "summaries" / "horizon.json").command == (
        "recurra train config.yaml --run runs/horizon"
    )


def test_no_command_is_named_that_gives_another_run(tmp_path):
    """The recipe has an option that the run has not, and no word of a command line takes one away."""
    other = HORIZON.replace("transition: data}", "transition: data, magnitude_activation: sigmoid}")
    for name, text in (("recipes/toy/other.yaml", other), ("mine.yaml", HORIZON)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    recipes = tmp_path / "recipes"
    assert training_command("x", load_recipe(tmp_path / "mine.yaml"), recipes) == (
        "recurra train config.yaml --run runs/x"
    )
    changed = load_recipe(recipes / "toy" / "other.yaml", ["--data.seed", "2", "--optimizer.gradient_clip", "0.5"])
    assert training_command("toy-other", changed, recipes) == (
        "recurra train recipes/toy/other.yaml --data.seed 2 --optimizer.gradient_clip 0.5"
    )


# --- mistakes ---


def test_what_is_no_run_or_would_be_another_is_refused(there, capsys, tmp_path):
    assert "expected the folder of a run" in failure(capsys, str(there), "--add", str(tmp_path))
    assert "these would change it: data.segment_length" in failure(
        capsys, str(there), "--add", "runs/toy-crt", "--data.segment_length", "3"
    )
    assert "--data.path says something of a run: give its folder with --add" in failure(
        capsys, str(there), "--data.path", "x"
    )
    assert not (there / "summaries").exists()


def test_a_run_without_a_checkpoint_is_refused(there, capsys, tmp_path):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.yaml").write_text(HORIZON)
    assert "best.pt, which does not exist" in failure(capsys, str(there), "--add", str(tmp_path / "young"))


def test_what_can_be_added_is_beside_a_run_that_is_refused(there, capsys, tmp_path):
    text = failure(capsys, str(there), "--add", str(tmp_path), "runs/horizon")
    assert text.count("expected the folder of a run") == 1
    assert "horizon:" not in text
    assert read_summary(there / "summaries/horizon.json").finished
    assert there.with_suffix(".md").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"checkpoint": "best", "step": 3, "accuracy": 0.5}', "is of step 3, and the best checkpoint is now of step"),
        ("{", "is not what `recurra eval` writes"),
        ("[]", "is not what `recurra eval` writes"),
    ],
)
def test_scores_of_another_checkpoint_or_broken_ones_are_refused(there, capsys, content, message):
    file = Path("runs/horizon/eval-test-odd.json")
    file.write_text(content)
    try:
        text = failure(capsys, str(there), "--add", "runs/horizon")
    finally:
        file.unlink()
    assert message in text
    assert str(file) in text


def test_a_broken_summary_and_a_broken_section_are_named(there, capsys):
    (there / "sections" / "02-bad.md.jinja").write_text("one\n{{ nothing }}\n")
    assert "02-bad.md.jinja, line 2: 'nothing' is undefined" in failure(capsys, str(there))
    (there / "summaries").mkdir()
    (there / "summaries" / "x.json").write_text("{")
    assert "x.json is not JSON" in failure(capsys, str(there))
    assert not there.with_suffix(".md").exists()


def test_a_folder_without_sections_is_refused(capsys, tmp_path):
    assert "there are no sections" in failure(capsys, str(tmp_path))


def test_the_command_is_listed(capsys):
    assert main(["--help"]) == 0
    assert "  report" in capsys.readouterr().out
