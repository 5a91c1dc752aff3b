"""Sweeps: what is tried, in which folders, and what a second call does."""

import logging
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.printed_tables import printed_columns

from recurra.cli import main
from recurra.cli.sweep import sweep_table
from recurra.runs import sweep
from recurra.runs.start import start_run
from recurra.runs.sweep import Range, Tried, grid, parse_space
from recurra.training import CheckpointFolder, load_recipe, optimizer_registry, read_metrics

RECIPE = """
experiment: text
data: {path: CORPUS, cache: CORPUS, batch_size: 2, segment_length: 4}
model: {n_layer: 1, d_model: 8, d_channel_mixing: 0, mixer: min-gru}
training: {max_steps: 2, epochs: 9, tensorboard: false, accelerator: cpu, threads: 1}
"""


@pytest.fixture
def recipe(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b c a b d\n" * 5)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("CORPUS", str(tmp_path)))
    return path


def test_words_and_ranges():
    space = parse_space({"a.b": "1,2", "c.d": "log:1e-4..1e-2", "e.f": "2..5"})
    assert space == {"a.b": ["1", "2"], "c.d": Range(1e-4, 1e-2, True, False), "e.f": Range(2.0, 5.0, False, True)}
    assert parse_space({"data.path": "../A,../B", "b": ".."}) == {"data.path": ["../A", "../B"], "b": [".."]}
    assert list(grid({"a": ["1", "2"], "b": ["x", "y"]})) == [
        {"a": "1", "b": "x"},
        {"a": "1", "b": "y"},
        {"a": "2", "b": "x"},
        {"a": "2", "b": "y"},
    ]


@pytest.mark.parametrize("text", ["3..1", "log:0..1", "a..b", "1..2..3"])
def test_a_range_has_two_rising_ends(text):
    with pytest.raises(ValueError, match=r"^a\.b is '"):
        parse_space({"a.b": text})


def test_a_number_of_trials_is_at_least_one(recipe, tmp_path, capsys):
    words = ["sweep", str(recipe), "--try", "training.seed=0,1", "--trials", "0", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--trials is 0; expected at least 1" in capsys.readouterr().err


def test_runs_on_another_corpus_are_not_taken_for_those_of_a_sweep(recipe, tmp_path, capsys):
    """Unless the corpus has moved."""
    other, moved = tmp_path / "other", tmp_path / "moved"
    for folder in (other, moved):
        folder.mkdir()
        for split in ("train", "valid", "test"):
            (folder / f"{split}.txt").write_text((tmp_path / f"{split}.txt").read_text())
    words = ["sweep", str(recipe), "--out", str(tmp_path / "out"), "--try", "training.seed=0", "--data.path"]
    assert main([*words, str(other)]) == 0
    config = (tmp_path / "out" / "seed=0" / "config.yaml").read_text()
    capsys.readouterr()
    assert main([*words, str(moved)]) == 2
    said = capsys.readouterr().err
    assert f"data.path is '{moved}'; expected '{other}', with which this run was trained" in " ".join(said.split())
    assert (tmp_path / "out" / "seed=0" / "config.yaml").read_text() == config
    other.rename(tmp_path / "gone")
    assert main([*words, str(moved)]) == 0


def test_a_range_needs_trials(recipe, capsys):
    assert main(["sweep", str(recipe), "--try", "optimizer.learning_rate=0.1..0.2"]) == 2
    assert "a range needs --trials" in capsys.readouterr().err


def test_each_run_has_a_folder_and_a_second_call_trains_nothing(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / "out"
    words = ["sweep", str(recipe), "--out", str(out), "--training.log_every", "1"]
    words += ["--try", "optimizer.learning_rate=0.001,1e30", "--try", "training.seed=0,1"]
    assert main(words) == 0
    names = [f"learning_rate={rate},seed={seed}" for rate in ("0.001", "1e30") for seed in (0, 1)]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    rows = read_metrics(out / names[0] / "log.jsonl")
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([1e-3, 5e-4])
    assert capsys.readouterr().out.count("diverged") == 2
    started = []
    monkeypatch.setattr(sweep, "start_run", lambda *given: started.append(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*words, "--debug"])  # those that diverged have no checkpoint, and begin again
    assert len(started) == 1


def test_a_run_that_another_process_trains_keeps_its_recipe(recipe, tmp_path):
    out = tmp_path / "out"
    values = {"optimizer.learning_rate": "0.001"}
    first = start_run(recipe, out / "learning_rate=0.001", ["--optimizer.learning_rate=0.001"])
    with pytest.raises(BlockingIOError):
        sweep.try_values(str(recipe), out, values, [])
    assert first.folder.config.exists()
    first.fit()
    assert sweep.try_values(str(recipe), out, values, []).scores


def test_a_run_that_begins_again_has_the_vocabulary_of_its_settings(recipe, tmp_path):
    """It ended before its first checkpoint, and its corpus is another now."""
    out, values = tmp_path / "out", {"optimizer.learning_rate": "0.001"}
    begun = start_run(recipe, out / "learning_rate=0.001", ["--optimizer.learning_rate=0.001"])
    before = begun.folder.tokenizer.read_text()
    begun.folder.unlock()
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("x y z x y w\n" * 5)
    assert sweep.try_values(str(recipe), out, values, []).scores
    assert begun.folder.tokenizer.read_text() != before


def test_a_shorter_sweep_does_not_take_longer_runs_for_its_own(recipe, tmp_path, capsys):
    words = ["sweep", str(recipe), "--out", str(tmp_path / "out"), "--try", "optimizer.learning_rate=0.001"]
    assert main([*words, "--training.max_steps", "3"]) == 0
    config = (tmp_path / "out" / "learning_rate=0.001" / "config.yaml").read_text()
    assert main([*words, "--training.max_steps", "2"]) == 2
    assert "is 2 steps in all; expected at least 3, which the run has already made" in capsys.readouterr().err
    assert (tmp_path / "out" / "learning_rate=0.001" / "config.yaml").read_text() == config


def test_a_key_is_given_once_and_columns_have_its_values(recipe, capsys):
    words = ["sweep", str(recipe), "--try", "training.seed=0", "--try", "training.seed=1"]
    assert main(words) == 2
    assert "--try is training.seed twice; expected each key once" in capsys.readouterr().err
    tried = [Tried(Path("a"), {"data.seed": "1", "training.seed": "2"}, {"step": 3, "loss": 0.5})]
    tried += [Tried(Path("b"), {"training.seed": "4", "data.seed": "5"}, {"step": 3, "loss": 0.4})]
    table = sweep_table("sweep", ["data.seed", "training.seed"], tried, "loss")
    assert [column.header for column in table.columns][:2] == ["data.seed", "training.seed"]
    assert [list(column.cells) for column in table.columns][:2] == [["5", "1"], ["4", "2"]]


def test_values_and_folders_are_whole_on_a_narrow_terminal(capsys):
    keys = ["optimizer.learning_rate", "training.seed", "model.d_model"]
    rates = ("0.00123456789", "0.00323456789")
    folders = [Path(f"runs/memory-horizon-data-controlled-sweep/learning_rate={rate},seed=0") for rate in rates]
    scores = {"loss": 1.23456, "accuracy": 0.75, "step": 12000}
    tried = [Tried(folder, dict(zip(keys, (rate, "0", "128"))), scores) for folder, rate in zip(folders, rates)]
    Console(width=80, markup=False).print(sweep_table("sweep", keys, tried, "loss"))
    columns = printed_columns(capsys.readouterr().out)
    assert columns[0] == "".join(("learning_rate", *rates))
    assert columns[-1] == "".join(("run", *map(str, folders)))


def test_a_longer_sweep_trains_its_runs_on(recipe, tmp_path):
    words = ["sweep", str(recipe), "--out", str(tmp_path / "out"), "--try", "optimizer.learning_rate=0.001"]
    words += ["--training.log_every", "1"]
    assert main(words) == 0
    assert main([*words, "--training.max_steps", "3"]) == 0
    rows = read_metrics(tmp_path / "out" / "learning_rate=0.001" / "log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_a_recipe_that_became_longer_trains_its_runs_on(recipe, tmp_path):
    """A run that is finished by the old recipe does not stand beside longer ones."""
    out = tmp_path / "out"
    assert sweep.try_values(str(recipe), out, {"optimizer.learning_rate": "0.001"}, []).scores["step"] == 2
    recipe.write_text(recipe.read_text().replace("max_steps: 2", "patience: 7, max_steps: 3, log_every: 1"))
    for rate in ("0.001", "0.002"):
        run = sweep.try_values(str(recipe), out, {"optimizer.learning_rate": rate}, []).folder
        assert read_metrics(run / "log.jsonl")[-1]["step"] == 3
        length = load_recipe(run / "config.yaml").training
        assert (length.epochs, length.max_steps, length.patience) == (9, 3, 7)


def test_a_run_killed_before_its_first_checkpoint_of_a_step_goes_on_from_its_best(recipe, tmp_path, monkeypatch):
    out, values, words = tmp_path / "out", {"optimizer.learning_rate": "0.001"}, ["--training.eval_every", "1"]
    run = sweep.try_values(str(recipe), out, values, words).folder
    for path in CheckpointFolder(run / "checkpoints").steps():
        path.unlink()
    monkeypatch.setattr(sweep, "start_run", lambda *given: 1 / 0)
    again = sweep.try_values(str(recipe), out, values, [*words, "--training.max_steps", "3"])
    assert again.scores
    assert read_metrics(run / "log.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize(
    ("tried", "more", "key"),
    [
        ("training.seed=0,1", ["--optimizer.learning_rate", "0.5"], "optimizer.learning_rate"),
        ("data.seed=0,1", [], "training.seed"),
    ],
    ids=["another setting", "another key of the same name"],
)
def test_runs_of_other_settings_are_not_taken_for_those_of_a_sweep(recipe, tmp_path, capsys, tried, more, key):
    words = ["sweep", str(recipe), "--out", str(tmp_path / "out")]
    assert main([*words, "--try", "training.seed=1"]) == 0
    assert main([*words, "--try", tried.replace("0,", ""), *more]) == 2
    said = capsys.readouterr().err
    assert "seed=1: the experiment is not that of the checkpoint in " in said
    assert key in said
    assert "or choose another folder with --out" in said


def test_optuna_chooses_and_continues(recipe, tmp_path):
    pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")
    out = tmp_path / "out"
    words = ["sweep", str(recipe), "--out", str(out), "--try", "optimizer.learning_rate=log:1e-4..1e-1"]
    assert main([*words, "--trials", "2"]) == 0
    assert len([path for path in out.iterdir() if path.is_dir()]) == 2
    assert main([*words, "--trials", "3"]) == 0
    assert len([path for path in out.iterdir() if path.is_dir()]) == 3


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ("0.001,0.003", "0.001,0.003", ""),
        ("0.001,0.003", "0.001,0.003,0.01", "is '0.001,0.003,0.01'; expected '0.001,0.003', as in the earlier trials"),
        ("0.001,0.003", "0.001..0.003", "is '0.001..0.003'; expected '0.001,0.003', as in"),
        ("0.1..0.3", "0.2..0.9", ""),
        ("0.1..0.3", "log:0.1..0.3", "is 'log:0.1..0.3'; expected '0.1..0.3', as in"),
        ("log:1..3", "log:0.5..3", "is 'log:0.5..3.0'; expected 'log:1..3', as in"),
    ],
)
def test_trials_are_added_to_those_of_the_same_values(tmp_path, before, now, refused):
    pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")
    asked = []

    def attempt(values):
        asked.append(values)
        return Tried(tmp_path, values, {"loss": 1.0})

    sweep.search(parse_space({"a.rate": before}), tmp_path, attempt, 1, "loss")
    if not refused:
        assert len(sweep.search(parse_space({"a.rate": now}), tmp_path, attempt, 2, "loss")) == 2
        return
    with pytest.raises(ValueError, match=f"^a.rate {re.escape(refused)}") as error:
        sweep.search(parse_space({"a.rate": now}), tmp_path, attempt, 2, "loss")
    assert str(error.value).endswith(f"{tmp_path}: give those again, or choose another folder with --out")
    assert len(asked) == 1


def test_a_damaged_study_is_refused(recipe, tmp_path, capsys):
    pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")
    words = ["sweep", str(recipe), "--out", str(tmp_path / "out"), "--try", "training.seed=0,1", "--trials", "1"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.db").write_text("no database" * 100)
    assert main(words) == 2
    said = f"the study is {tmp_path / 'out' / 'study.db'}, which is damaged; expected one that recurra sweep wrote"
    assert said in capsys.readouterr().err
    (tmp_path / "out" / "study.db").unlink()
    (tmp_path / "out" / "study.db").mkdir()
    assert main(words) == 2
    assert "study.db cannot be opened: unable to open database file" in capsys.readouterr().err


@pytest.mark.parametrize("fate", [KeyboardInterrupt("SIGINT"), OSError("the disk is full")], ids=lambda fate: str(fate))
def test_optuna_is_silent_where_a_run_ends(tmp_path, monkeypatch, caplog, fate):
    """The command says it in a sentence of its own."""
    pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")
    monkeypatch.setattr(logging.getLogger("optuna"), "propagate", True)

    def attempt(values):
        raise fate

    with pytest.raises(type(fate)):
        sweep.search({"a.rate": ["1"]}, tmp_path, attempt, 1, "loss")
    assert caplog.text == ""


def test_code_of_ones_own_is_imported_first(recipe, tmp_path, monkeypatch):
    (tmp_path / "own_mixer_of_a_test.py").write_text(
        "from recurra.mixers import register_mixer\n"
        "from recurra.mixers.min_gru import MinGRU\n"
        "import recurra.mixers.registry as registry\n"
        "if 'own-of-a-test' not in registry.list_mixers():\n"
        "    register_mixer('own-of-a-test')(type('Own', (MinGRU,), {}))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["train", str(recipe), "--run", str(tmp_path / "run"), "--model.mixer", "own-of-a-test"]
    assert main(words) == 2
    assert main([*words, "--import", "own_mixer_of_a_test"]) == 0


def test_an_optimiser_of_ones_own_trains_and_resumes(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(optimizer_registry._optimizers, "_entries", dict(optimizer_registry._optimizers._entries))
    monkeypatch.delitem(sys.modules, "own_optimizer_of_a_test", raising=False)
    (tmp_path / "own_optimizer_of_a_test.py").write_text(
        "from torch.optim import RMSprop\n"
        "from recurra.training import register_optimizer\n"
        "register_optimizer('rmsprop-of-a-test')(RMSprop)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--optimizer.algorithm", "rmsprop-of-a-test", "--optimizer.own_options", "{alpha: 0.5}"]
    words, run = (
        ["train", str(recipe), "--training.max_steps", "2", "--schedule.final_fraction", "1", *options],
        tmp_path / "run",
    )
    assert main([*words, "--run", str(run)]) == 2
    assert "optimizer.algorithm is 'rmsprop-of-a-test'; expected one of adamw, muon, sgd" in capsys.readouterr().err
    own = ["--import", "own_optimizer_of_a_test"]
    assert main([*words, "--run", str(run), *own]) == 0
    assert main([*words, "--optimizer.own_options", "{alphas: 1}", "--run", str(tmp_path / "other"), *own]) == 2
    expected = "optimizer.own_options is options with 'alphas' for rmsprop-of-a-test; expected some of alpha, eps,"
    assert expected in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--training.max_steps", "4", *own]) == 0
    assert main([*words, "--training.max_steps", "4", "--run", str(tmp_path / "whole"), *own]) == 0
    ends = [read_metrics(folder / "log.jsonl")[-1]["valid_loss"] for folder in (run, tmp_path / "whole")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["there.is.none", "own_code_of_tests.py", "own_code_of_tests.none", "./own.py", ""])
def test_a_module_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.delitem(sys.modules, "own_code_of_tests", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_code_of_tests.py").write_text("")
    assert main(["info", "--import", name]) == 2
    assert f"--import is {name!r}; expected a module that Python finds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import there_is_none", "ModuleNotFoundError: No module named 'there_is_none'"),
        ("[][3]", "IndexError: list index out of range"),
        ("raise RuntimeError", "RuntimeError"),
        ("def", "SyntaxError: invalid syntax (own_code_of_tests.py, line 1)"),
    ],
)
def test_an_error_in_code_of_ones_own_is_said_as_it_is(tmp_path, monkeypatch, capsys, code, said):
    monkeypatch.delitem(sys.modules, "own_code_of_tests", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_code_of_tests.py").write_text(code)
    words = ["info", "--import", "own_code_of_tests"]
    assert main(words) == 2
    assert capsys.readouterr().err == f"recurra info: --import own_code_of_tests: {said}\n"
    with pytest.raises(ValueError, match="own_code_of_tests") as error:
        main([*words, "--debug"])
    assert type(error.value.__cause__).__name__ == said.partition(":")[0]


def test_the_rate_test_leaves_nothing_behind(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["rates", str(recipe), "--steps", "4"]) == 0
    assert "the loss fell fastest at" in capsys.readouterr().out
    assert sorted(path for path in tmp_path.iterdir() if path.suffix not in (".bin", ".json")) == before


def test_a_killed_trial_continues_and_others_are_not_repeated(tmp_path):
    """The second trial is killed, the third diverges, the fourth ends with an error."""
    pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")
    asked = []
    fates = [None, KeyboardInterrupt("SIGTERM"), "diverged", OSError("the disk is full")]

    def attempt(values):
        asked.append(values)
        fate = fates.pop(0) if fates else None
        if isinstance(fate, BaseException):
            raise fate
        return Tried(tmp_path / f"rate={values['a.rate']}", values, {} if fate else {"loss": 1.0}, fate or "")

    def sweep_again(n_trials):
        before = len(asked)
        tried = sweep.search({"a.rate": Range(0.1, 1.0)}, tmp_path, attempt, n_trials, "loss")
        return tried, [values["a.rate"] for values in asked[before:]]

    with pytest.raises(KeyboardInterrupt):
        sweep_again(3)
    first, killed = (values["a.rate"] for values in asked)
    fates[:] = [None, None, "diverged", OSError("the disk is full")]
    with pytest.raises(OSError, match="full"):
        sweep_again(4)
    assert [values["a.rate"] for values in asked[2:4]] == [first, killed], "one is read, the other continues"
    diverged, failed = (values["a.rate"] for values in asked[4:])
    tried, again = sweep_again(4)
    assert again[:2] == [first, killed]
    assert len(again) == 3
    assert again[2] not in (diverged, failed)
    assert [one.values["a.rate"] for one in tried] == [first, killed, diverged, again[2]]
    assert [one.error for one in tried] == ["", "", "diverged", ""]


def test_one_process_sweeps_at_a_time(tmp_path):
    pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")

    def attempt(values):
        with pytest.raises(BlockingIOError, match=r"^the sweep in .* is under way in another process; expected one"):
            sweep.search({"a.rate": ["1"]}, tmp_path, attempt, 1, "loss")
        return Tried(tmp_path, values, {"loss": 1.0})

    assert len(sweep.search({"a.rate": ["1"]}, tmp_path, attempt, 1, "loss")) == 1


@pytest.mark.parametrize("n_kills", [1, 2, 3])
def test_what_kills_its_process_is_not_tried_for_ever(tmp_path, n_kills):
    optuna = pytest.importorskip("optuna", reason="needs the extra sweep: pip install recurra[sweep]")
    study = optuna.create_study(study_name="sweep", storage=f"sqlite:///{tmp_path / 'study.db'}")
    deadly = {"a.rate": 0.25}
    for number in range(n_kills):
        study.enqueue_trial(deadly)
        study.ask({"a.rate": optuna.distributions.FloatDistribution(0.1, 1.0)})
        if number < n_kills - 1:
            study.tell(number, state=optuna.trial.TrialState.FAIL)
    asked = []

    def attempt(values):
        asked.append(values["a.rate"])
        return Tried(tmp_path, values, {"loss": 1.0})

    sweep.search({"a.rate": Range(0.1, 1.0)}, tmp_path, attempt, 1, "loss")
    assert (asked == ["0.25"]) == (n_kills < 3)
    assert len(asked) == 1


def test_brackets_in_names_are_printed(recipe, tmp_path, capsys):
    """In a table of rich they would be markup."""
    words = ["sweep", str(recipe), "--out", str(tmp_path / "[wide]"), "--try", "model.mixer=[min-gru]"]
    assert main([*words, "--training.max_steps", "1", "--model.mixer_options", "{}"]) == 0
    said = capsys.readouterr().out
    assert "[min-gru]" in said
    assert "[wide]" in said
