"""The command line from outside: words in, files, lines and exit codes out."""

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

from recurra.cli import demo, main
from recurra.cli.arguments import split_overrides
from recurra.runs.start import default_run_folder

RECIPE = """
experiment: memory-horizon
data: {n_samples: 40, sequence_length: 24, batch_size: 8, resets_per_sample: 2}
model:
  n_layer: 2
  d_model: 8
  d_channel_mixing: 16
  dropout: 0.1
  mixer_options: {d_qk: 8, d_v: 8, n_heads: 8, transition: data}
schedule: {warmup_steps: 4}
training: {epochs: 3, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""


TEXT_RECIPE = """
experiment: text
data: {path: REPLACED, batch_size: 2, eval_batch_size: 1, segment_length: 4}
model:
  n_layer: 1
  d_model: 8
  mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}
  tie_embeddings: true
training: {epochs: 2, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Runs set the number of threads of this process; put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "recipe.yaml"), "--run", str(folder / "run")]) == 0
    return str(folder / "run")


def measured(run: Path) -> list[dict[str, str]]:
    """The rows of a run's log, without what depends on the clock."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: row[name] for name in row if name not in ("seconds", "tokens_per_second")} for row in rows]


def failure(capsys, *words: str) -> str:
    """The one message that a failing command prints."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith(f"recurra {words[0]}: ")
    return captured.err


# --- train ---


def test_train_writes_a_complete_run(trained):
    run = Path(trained)
    assert {path.name for path in run.iterdir()} >= {
        "config.yaml",
        "metrics.csv",
        "summary.json",
        "checkpoints",
    }
    rows = measured(run)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row["valid_loss"]] == ["4", "8", "12"]
    assert json.loads((run / "summary.json").read_text())["finished"] is True


def test_overrides_reach_the_run_wherever_they_stand(recipe, tmp_path):
    words = [
        "train",
        "--training.epochs",
        "1",
        recipe,
        "--run",
        str(tmp_path / "run"),
        "--training.max_steps=2",
    ]
    assert main(words) == 0
    assert len(measured(tmp_path / "run")) == 2


def test_a_run_is_not_overwritten(capsys, recipe, trained):
    before = measured(Path(trained))
    message = failure(capsys, "train", recipe, "--run", trained)
    assert f"recurra train --resume {trained}" in message
    assert measured(Path(trained)) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.epoch", "2"], "training.epoch is an unknown key"),
        (["--training.epochs", "0"], "training.epochs is 0; expected at least 1"),
        (["--training.precision", "half"], "training.precision"),
        (["--model.mixer", "nonsense"], "nonsense"),
        (["--training.epochs"], "--training.epochs is the last word; expected a value after it"),
    ],
)
def test_wrong_keys_and_values_leave_no_run(capsys, recipe, tmp_path, words, message):
    run = tmp_path / "run"
    assert message in failure(capsys, "train", recipe, "--run", str(run), *words)
    assert not run.exists()


def test_a_missing_corpus_leaves_no_run(capsys, tmp_path):
    (tmp_path / "text.yaml").write_text("experiment: text\n")
    run, corpus = tmp_path / "run", tmp_path / "nowhere"
    message = failure(capsys, "train", str(tmp_path / "text.yaml"), "--run", str(run), "--data.path", str(corpus))
    assert str(corpus) in message
    assert not run.exists()


@pytest.mark.parametrize(
    "words", [[], ["a.yaml", "--resume", "b"], ["--resume", "a", "--run", "b"], ["a.yaml", "--checkpoint", "best"]]
)
def test_arguments_that_would_be_ignored_are_refused(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    assert "--resume" in capsys.readouterr().err.splitlines()[-1]


def test_debug_shows_where_an_error_comes_from(monkeypatch):
    monkeypatch.setenv("RECURRA_DEBUG", "1")
    with pytest.raises(ValueError, match="nowhere"):
        main(["train", "nowhere.yaml"])


def test_help_shows_every_field_with_its_docstring(capsys, recipe):
    assert main(["train", recipe, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--resume RUN continue the run in this folder" in text
    assert "--training.epochs EPOCHS Passes over the training data. (type: int, default: 3)" in text
    assert "--data.sequence_length" in text


def test_the_default_folder_tells_recipes_of_one_name_apart():
    assert default_run_folder("recipes/ptb/gateloop.yaml") == Path("runs/ptb-gateloop")
    assert default_run_folder("recipes/ptb/transformers.yaml#crt-gru") == Path("runs/ptb-crt-gru")


def test_overrides_are_told_from_a_commands_own_words():
    words = [
        "--run",
        "a",
        "--data.path",
        "--odd",
        "recipe.yaml",
        "--model.d_model=3",
        "--optimizer",
        "x.yaml",
        "-h",
    ]
    assert split_overrides(words) == (
        ["--run", "a", "recipe.yaml", "-h"],
        ["--data.path", "--odd", "--model.d_model=3", "--optimizer", "x.yaml"],
    )


# --- interruptions ---


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-c", "import sys; from recurra.cli import main; sys.exit(main())", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_rows(run: Path, n_rows: int, process: subprocess.Popen) -> None:
    metrics = run / "metrics.csv"
    while not (metrics.is_file() and metrics.read_text().count("\n") > n_rows):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)


def test_a_killed_run_repeats_the_uninterrupted_one_bit_for_bit(recipe, tmp_path):
    """kill -9 in the middle; the resumed run logs what the uninterrupted one logged, digit by digit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    longer = ["--training.epochs", "50", "--training.save_every", "7"]
    assert main(["train", recipe, "--run", str(whole), *longer]) == 0

    process = start("train", recipe, "--run", str(killed), *longer)
    wait_for_rows(killed, 45, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 45 <= len(measured(killed)) < 200

    process = start("train", "--resume", str(killed))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert measured(killed) == measured(whole)


def test_a_terminated_run_saves_and_says_how_to_go_on(recipe, tmp_path):
    run = tmp_path / "run"
    process = start("train", recipe, "--run", str(run), "--training.epochs", "10000")
    wait_for_rows(run, 10, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM at step" in errors
    assert f"recurra train --resume {run}" in errors
    assert json.loads((run / "summary.json").read_text())["finished"] is False
    last = int(measured(run)[-1]["step"])
    assert (run / "checkpoints" / f"step-{last:010d}.pt").is_file()


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_works(capsys, recipe, tmp_path):
    run = tmp_path / "run"
    assert main(["train", recipe, "--run", str(run)]) == 0
    expected = measured(run)
    last = run / "checkpoints" / "step-0000000012.pt"
    last.write_bytes(last.read_bytes()[:-100])
    message = failure(capsys, "train", "--resume", str(run))
    assert str(last) in message
    assert "--checkpoint previous" in message
    assert main(["train", "--resume", str(run), "--checkpoint", "previous"]) == 0
    assert measured(run) == expected


# --- the other commands ---


def test_eval_prints_and_writes_the_scores(capsys, trained):
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last"]) == 0
    assert "accuracy" in capsys.readouterr().out
    scores = json.loads((Path(trained) / "eval-valid.json").read_text())
    assert scores["step"] == 12
    assert scores["loss"] == float(measured(Path(trained))[-1]["valid_loss"])


def test_plot_draws_every_figure_as_png_and_svg(capsys, trained):
    assert main(["plot", trained]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = {"gate-magnitudes", "gate-phases", "magnitude-activations", "curves", "accuracy-by-span"}
    assert {path.name for path in files} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.stat().st_size > 1000 and path.parent == Path(trained) / "figures" for path in files)


def test_a_text_run_is_trained_scored_and_drawn(capsys, tmp_path):
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    corpus.mkdir()
    for split, n_lines in (("train", 12), ("valid", 3), ("test", 4)):
        (corpus / f"{split}.txt").write_text(" the cat sat on a mat \n" * n_lines)
    recipe = tmp_path / "text.yaml"
    recipe.write_text(TEXT_RECIPE)
    assert main(["train", str(recipe), "--run", str(run), "--data.path", str(corpus)]) == 0
    assert main(["eval", str(run)]) == 0
    scores = json.loads((run / "eval-test.json").read_text())
    assert scores["n_targets"] == 4 * 7 - 1
    assert scores["perplexity"] < 8
    capsys.readouterr()
    assert main(["plot", str(run)]) == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert names == {"gate-magnitudes", "gate-phases", "magnitude-activations", "curves"}


def test_demo_compares_both_models_and_continues_where_it_was_stopped(capsys, monkeypatch, tmp_path):
    recipes, out = tmp_path / "recipes", tmp_path / "out"
    (recipes / "demo").mkdir(parents=True)
    for name, transition in (("data-controlled", "data"), ("fixed", "fixed")):
        text = RECIPE.replace("transition: data", f"transition: {transition}")
        (recipes / "demo" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(demo, "recipes_folder", lambda: recipes)
    assert main(["demo", "--run", str(out)]) == 0
    text = capsys.readouterr().out
    assert "data-controlled transition" in text
    assert "Test accuracy" in text
    assert (out / "figures" / "accuracy-by-span.svg").is_file()
    assert (out / "fixed" / "figures" / "gate-magnitudes.png").is_file()
    before = measured(out / "fixed")
    assert main(["demo", "--run", str(out)]) == 0
    assert "continued in" in capsys.readouterr().out
    assert measured(out / "fixed") == before


def test_info_names_versions_backends_and_mixers(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "reference on cpu", "gateloop", "memory-horizon"):
        assert word in text


def test_a_folder_without_a_run_is_refused(capsys, tmp_path):
    for command in ("eval", "plot"):
        assert "expected the folder of a run" in failure(capsys, command, str(tmp_path))
    assert "expected the folder of a run" in failure(capsys, "train", "--resume", str(tmp_path))


def test_the_commands_are_listed(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in ("train", "eval", "plot", "demo", "info"):
        assert f"  {name}" in listed
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("av", "av is missing: pip install recurra[video]"),
        ("onnx.checker", "onnx.checker is missing: pip install recurra[export]"),
    ],
)
def test_a_missing_extra_is_named(capsys, monkeypatch, package, said):
    def fail(words):
        raise ImportError("not there", name=package)

    monkeypatch.setattr("recurra.cli.info.run", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == f"recurra info: {said}\n"
    monkeypatch.setenv("RECURRA_DEBUG", "1")
    with pytest.raises(ImportError, match="not there"):
        main(["info"])


def test_another_import_error_is_a_mistake_of_ours(monkeypatch):
    def fail(words):
        raise ImportError("a part of recurra", name="recurra.nothing")

    monkeypatch.setattr("recurra.cli.info.run", fail)
    with pytest.raises(ImportError, match="a part of recurra"):
        main(["info"])


def test_a_reader_that_goes_away_is_no_error():
    code = "from recurra.cli import main; import recurra.cli.info as i\n"
    code += "def run(words):\n    while True: print('more')\ni.run = run\nraise SystemExit(main(['info']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
