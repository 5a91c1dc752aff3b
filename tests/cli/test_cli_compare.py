"""`recurra compare`: what is trained, what is compared, and how the table looks."""

import csv
import io
import json
import re
import signal
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.cli.conftest import failure
from torch.utils.flop_counter import FlopCounterMode

from recurra.cli import compare, main, sweep
from recurra.cli.compare import _MixerRow
from recurra.cli.sweep import SweptRun
from recurra.train.recipe import load_recipe, to_yaml
from recurra.train.run_folder import RunFolder

ROW = _MixerRow(
    mixer="gru",
    d_model=64,
    parameters=1_234_567,
    flops_per_token=999.6,
    tokens_per_second=84_213.5,
    state_bytes=950,
    ms_per_step=12.345,
    monitor="loss",
    scores=[1.5, 1.25, 1.75],
    n_runs=3,
)
OTHERS = [
    replace(ROW, mixer="gateloop-attention", scores=[2.5, 2.25]),
    replace(ROW, mixer="s5", scores=[1.0], n_runs=1, tokens_per_second=None),
    replace(ROW, mixer="lost", scores=[]),
]
SHORT = "--training.epochs 1 --data.n_samples 16 --data.sequence_length 8 --model.n_layer 1 --training.log_every 9"


@pytest.fixture
def recipe(recipe: str) -> str:
    """A recipe whose options every mixer takes: none."""
    text = Path(recipe).read_text()
    Path(recipe).write_text("\n".join(line for line in text.splitlines() if "mixer_options" not in line))
    return recipe


@pytest.mark.usefixtures("unrendered_figures")
def test_mixers_are_trained_and_finished_runs_are_compared(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_MEASURED", 1)
    out = tmp_path / "out"
    words = ["--mixers", "min-gru,min-lstm", "--seeds", "1", "--runs", str(out), "--json"]
    assert main(["compare", recipe, *words, *SHORT.split()]) == 0
    captured = capsys.readouterr()
    rows = {row["mixer"]: row for row in json.loads(captured.out)}
    assert rows.keys() == {"min-gru", "min-lstm"}
    assert "run 2 of 2: min-lstm, seed 0" in captured.err
    runs = {f"mixer={name},seed=0": name for name in rows}
    assert {path.name for path in out.iterdir()} == {*runs, "compare.png", "compare.svg"}
    for folder, name in runs.items():
        summary = RunFolder(out / folder).read_summary()
        assert rows[name]["scores"] == [summary["validation"]["best"]["loss"]]
        assert rows[name]["parameters"] == summary["parameters"]
        assert rows[name]["ms_per_step"] > 0
    monkeypatch.delattr(sweep.Trainer, "fit")
    again = "scores", "tokens_per_second", "state_bytes", "flops_per_token"
    assert main(["compare", recipe, *words, *SHORT.split()]) == 0
    assert "run 2 of 2: min-lstm, seed 0\nalready finished\n" in capsys.readouterr().err
    assert main(["compare", *(str(out / folder) for folder in runs)]) == 0
    assert (out / "compare-mixer=min-gru,seed=0-mixer=min-lstm,seed=0.png").is_file()
    capsys.readouterr()
    assert main(["compare", "--runs", str(out), "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert [row[key] for key in again] == [rows[row["mixer"]][key] for key in again]
    summary = out / "mixer=min-gru,seed=0" / "summary.json"
    summary.write_text(summary.read_text().replace('"finished": true', '"finished": false'))
    message = failure(capsys, "compare", str(summary.parent))
    assert "which is not finished, has diverged or was not validated; expected a finished run: train it" in message
    assert message.endswith(f"`recurra train --resume {summary.parent}`, or leave it out\n")


@pytest.fixture
def trained(monkeypatch) -> list[tuple[dict, dict]]:
    """What would be trained, as the values of its key and the fixed ones."""
    found = []

    def pretend(recipe, out, values, fixed, console):
        found.append((values, fixed))
        return SweptRun(out, values, {})

    monkeypatch.setattr(compare, "train_with", pretend)
    monkeypatch.setattr(compare, "_grouped", lambda runs: sys.exit(0))
    return found


def counted_flops(model):
    """Of a forward pass of 8 steps, whose number the comparison of widths does not depend on."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 8, dtype=torch.int64))
    return counter.get_total_flops()


SIZES = {
    "parameters": compare._n_parameters,
    "flops": lambda model, sizes: counted_flops(model.build(sizes)),
}


@pytest.mark.parametrize("equal", SIZES)
def test_a_width_makes_another_mixer_as_large(recipe, trained, capsys, equal):
    text = Path(recipe).read_text().replace("n_layer: 2", "n_layer: 1").replace("d_model: 8", "d_model: 20")
    Path(recipe).write_text(text)
    with pytest.raises(SystemExit):
        main(["compare", recipe, "--mixers", "gateloop,min-gru", "--equal", equal, "--seeds", "1"])
    (own, _), (other, _) = trained
    assert "model.d_model" not in own
    experiment = load_recipe(recipe)
    sizes = experiment.sizes(experiment.build_data())
    target, width = SIZES[equal](experiment.model, sizes), int(other["model.d_model"])
    models = [replace(experiment.model, mixer="min-gru", d_model=n) for n in (width, width - 1, width + 1)]
    near, *others = (abs(SIZES[equal](model, sizes) - target) for model in models)
    assert compare._n_flops(experiment.model, sizes, length=8) == SIZES["flops"](experiment.model, sizes)
    assert near < min(others)
    assert near / target < 0.05
    assert "note" not in capsys.readouterr().err


def test_widths_that_come_not_close_are_said(recipe, trained, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_closest_width", lambda parameters, target, unit, start: 16)
    with pytest.raises(SystemExit):
        main(["compare", recipe, "--mixers", "gru", "--equal", "parameters"])
    said = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"note: the closest width of mixer gru, 16, is \+\d+% away", said)


def test_each_seed_trains_all_mixers(recipe, trained):
    """Of settings for a state transition, a mixer without one says that they are not used."""
    decay = ["--optimizer.transition_weight_decay", "0.1"]
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="transition_weight_decay is not used"):
        main(["compare", recipe, "--mixers", "gru,gateloop", "--seeds", "2", *decay])
    order = [(values["model.mixer"], values["training.seed"]) for values, _ in trained]
    assert order == [("gru", "0"), ("gateloop", "0"), ("gru", "1"), ("gateloop", "1")]


def test_the_closest_width_is_one_that_the_mixer_allows():
    def parameters(width):
        return None if width % 12 else 10 * width

    assert [compare._closest_width(parameters, 250, 4, start) for start in (4, 24, 400)] == [24] * 3
    assert [compare._closest_width(parameters, 310, 4, start) for start in (4, 24, 400)] == [36] * 3
    assert [compare._closest_width(parameters, 300, 4, start) for start in (4, 24, 400)] == [24] * 3
    assert [compare._closest_width(parameters, 1, 4, start) for start in (4, 24, 400)] == [12] * 3
    asked: list[int] = []
    assert compare._closest_width(lambda width: asked.append(width) or 10 * width, 5000, 4, 400) == 500
    assert len(asked) < 20  # of 125 that are narrower
    with pytest.raises(ValueError, match=r"model\.d_model is 4 and above, refused; expected a width that the mixer"):
        compare._closest_width(lambda width: None, 5, 4, 4)


def test_the_best_mixer_comes_first_and_those_that_diverged_last():
    assert [row.mixer for row in compare._best_first([*OTHERS, ROW])] == ["s5", "gru", "gateloop-attention", "lost"]
    by_accuracy = [replace(row, monitor="accuracy") for row in (*OTHERS, ROW)]
    assert [row.mixer for row in compare._best_first(by_accuracy)] == ["gateloop-attention", "gru", "s5", "lost"]


def test_the_table_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    compare._print([ROW, *OTHERS], None, "some-recipe-compare")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    lines = [line.split() for line in printed.splitlines()]
    numbers = ["1.23M", "1.00k", "84.2k", "950", "12.35"]
    assert ["gru", *numbers, "3", "1.5000", "±", "0.2500"] in lines
    assert ["s5", "1.23M", "1.00k", "-", "950", "12.35", "1", "1.0000"] in lines
    assert ["lost", *numbers, "0/3", "diverged"] in lines
    assert ["gateloop-attention", *numbers, "2/3", "2.3750", "±", "0.1768"] in lines
    assert "runs: finished/all; the others diverged" in printed
    monkeypatch.setenv("COLUMNS", "40")
    compare._print([ROW, *OTHERS], None, "some-recipe-compare")
    assert {"gru", "gateloop-att", "ention", "s5", "lost"} <= {*capsys.readouterr().out.split()}


def test_the_table_for_latex_escapes_its_cells(capsys):
    compare._print([replace(ROW, mixer="my_gru & 5%")], "latex", "")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == r"\begin{tabular}{lrrrrrrr}"
    assert printed[4] == r"my\_gru \& 5\% & 1.23M & 1.00k & 84.2k & 950 & 12.35 & 3 & 1.5000 $\pm$ 0.2500 \\"
    assert all(line.count(" & ") == 7 for line in (printed[2], printed[4].replace(r"\&", "")))


def test_the_table_as_csv_has_all_numbers(capsys):
    compare._print([ROW, OTHERS[-1]], "csv", "")
    first, last = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["parameters"], first["scores"], first["mean"]) == ("1234567", "1.5 1.25 1.75", "1.5")
    assert (last["scores"], last["mean"], last["deviation"]) == ("", "", "")


def test_curves_are_averaged_where_all_runs_have_a_score():
    logs = [
        [{"step": 1, "a": 1.0}, {"step": 2, "b": 5.0, "a": None}, {"step": 3, "a": 3.0}],
        [{"step": 1, "a": 2.0}, {"step": 2, "a": 2.0}, {"step": 3, "a": 4.0}, {"step": 4, "a": 0.0}],
    ]
    assert compare._mean_curve(logs, "a") == [{"step": 1, "a": 1.5}, {"step": 3, "a": 3.5}]
    assert compare._mean_curve([], "a") == []


@pytest.fixture
def swept(recipe, tmp_path):
    """Make a run that was not trained, with some overrides."""

    def make(name: str, *overrides: str) -> SweptRun:
        folder = RunFolder(tmp_path / "runs" / name)
        folder.write_config(to_yaml(load_recipe(recipe, overrides)))
        return SweptRun(folder.path, {}, {})

    return make


def test_runs_that_differ_only_in_their_seed_are_averaged(swept):
    gru, narrow = "--model.mixer=gru", "--model.d_model=4"
    runs = [swept("a", gru), swept("b", gru, "--training.seed=1", "--training.save_every=7"), swept("c")]
    named = {name: [run.name for run, _ in group] for name, group in compare._grouped(runs).items()}
    assert named == {"gru": ["a", "b"], "gateloop": ["c"]}
    assert compare._grouped([*runs, swept("d", gru, narrow)]).keys() == {"a", "gateloop", "d"}
    message = r"training\.seed of .*runs/a, .*runs/b, .*runs/e is \[0, 1, 0\]; expected a different seed for each run"
    with pytest.raises(ValueError, match=message):
        compare._grouped([*runs, swept("e", gru)])
    clash = [swept("gateloop", gru), swept("f", gru, narrow), swept("c")]
    with pytest.raises(ValueError, match="several with the names gateloop, f, gateloop'; expected folders with"):
        compare._grouped(clash)


def test_runs_of_a_folder_that_are_not_finished_are_left_out(swept, tmp_path, capsys):
    done, other = swept("a"), swept("b")
    with pytest.raises(ValueError, match="expected a folder with the folders of finished runs"):
        compare._finished_in(tmp_path / "runs", Console())
    RunFolder(done.folder).summary.write_text('{"finished": true, "validation": {"best": {"loss": 1.0}}}')
    capsys.readouterr()
    (found,) = compare._finished_in(tmp_path / "runs", Console(markup=False, width=40))
    assert (found.folder, found.scores) == (done.folder, {"loss": 1.0})
    assert capsys.readouterr().out.startswith(f"note: left out: run is {other.folder}, which is not finished")


def test_other_differences_are_said_or_refused(swept, capsys):
    def note(*runs: SweptRun) -> str:
        groups = compare._grouped(runs)
        compare._note_differences([group[0][0] for group in groups.values()], Console(markup=False, width=40))
        return capsys.readouterr().out

    first = swept("a")
    assert note(first, swept("b", "--model.mixer=gru", "--training.seed=3")) == ""
    longer = swept("c", "--model.mixer=gru", "--training.epochs=9", "--optimizer.weight_decay=0.5")
    differ = "note: the runs differ in more than their models: optimizer.weight_decay, training.epochs\n"
    assert note(first, longer) == differ
    with pytest.raises(ValueError, match=r"training\.monitor of .* is 'accuracy'; expected loss, as in "):
        note(first, swept("d", "--training.monitor=accuracy"))


def test_runs_of_different_vocabularies_are_refused(text_recipe, tmp_path, capsys):
    first, other = tmp_path / "first", tmp_path / "other"
    assert main(["train", str(text_recipe), "--run-dir", str(first)]) == 0
    assert main(["train", str(text_recipe), "--run-dir", str(other), "--data.vocabulary=bytes"]) == 0
    message = failure(capsys, "compare", str(first), str(other))
    assert f"the vocabulary of {other} is different; expected that of {first}: their scores cannot be comp" in message


@pytest.mark.usefixtures("unrendered_figures")
@pytest.mark.parametrize("vocabulary", ["words", "bytes"])
def test_a_text_and_its_shards_are_compared(vocabulary, text_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_MEASURED", 1)
    (first := tmp_path / ("я" * 110)).mkdir()
    monkeypatch.chdir(first)
    words = ["train", str(text_recipe), "--data.vocabulary", vocabulary]
    assert main([*words, "--run-dir", str(first)]) == 0
    assert main(["prepare", str(tmp_path), "--out", str(tmp_path / "out"), "--vocabulary", vocabulary]) == 0
    shards = ["--data.source=shards", f"--data.path={tmp_path / 'out'}", "--model.mixer=gru"]
    assert main([*words, *shards, "--run-dir", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert main(["compare", ".", str(tmp_path / "other"), "--json"]) == 0
    assert "note: the runs differ in more than their models: data.path, data.source\n" in capsys.readouterr().err
    assert len([*tmp_path.glob("compare-я*.png")]) == 1


@pytest.mark.usefixtures("unrendered_figures")
def test_mixers_that_diverge_have_their_rows(text_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_MEASURED", 1)
    words = [
        "--mixers",
        "gru,min-gru",
        "--seeds",
        "1",
        "--runs",
        str(tmp_path / "out"),
        "--optimizer.learning_rate=1e38",
    ]
    assert main(["compare", str(text_recipe), *words]) == 0
    assert capsys.readouterr().out.count("diverged") == 3


def test_an_interrupt_says_how_to_go_on(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep.Trainer, "fit", lambda trainer, console: Namespace(received=signal.SIGINT))
    assert main(["compare", recipe, "--mixers", "gru", "--runs", str(tmp_path / "out"), *SHORT.split()]) == 130
    assert capsys.readouterr().err.endswith("recurra compare: interrupted: run the same command again to continue\n")


def test_a_recipe_without_a_mixer_is_named(capsys):
    message = failure(capsys, "compare", "ptb/three-layers#crt-gru-n70-8-epochs", "--mixers", "gru")
    assert (
        "recipe is ptb/three-layers#crt-gru-n70-8-epochs, a text-crt; expected one whose model takes a mixer" in message
    )


def test_mistakes_are_explained_before_anything_is_trained(recipe, tmp_path, capsys):
    for more in ([], ["--equal", "parameters"]):
        message = failure(capsys, "compare", recipe, "--mixers", "gateloop,min-gur", *more)
        assert "unknown mixer 'min-gur'" in message
        assert "did you mean min-gru?" in message
    Path(recipe).write_text(Path(recipe).read_text().replace("d_model: 8", "d_model: 9"))
    assert "9" in failure(capsys, "compare", recipe, "--mixers", "retnet", "--runs", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert "expected a folder with the folders of finished runs" in failure(capsys, "compare", "--runs", str(tmp_path))
    assert "has no config.yaml; expected the folder of a run" in failure(capsys, "compare", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a RECIPE and --mixers, or finished runs, or their folder with --runs"),
        (["run", "--runs", "runs"], "give a RECIPE and --mixers, or finished runs"),
        (["run", "--equal", "parameters"], "only --mixers trains: without it, omit --seeds, --equal"),
        (["run", "--training.epochs", "2"], "only --mixers trains"),
        (["a", "b", "--mixers", "gru"], "--mixers trains one RECIPE"),
        (["a", "--mixers", "gru,,s5"], "'gru,,s5'; expected names separated by commas"),
        (["a", "--mixers", "gru", "--seeds", "0"], "--seeds is 0; expected at least 1"),
        (["a", "--mixers", "gru", "--training.seed=1"], "--seeds sets training.seed: omit --training.seed"),
        (["a", "--mixers", "gru", "--model.mixer", "s5"], "--mixers sets model.mixer: omit --model.mixer"),
        (["a", "--mixers", "gru", "--json", "--csv"], "not allowed with argument --json"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value) or "nothing",
)
def test_arguments_that_do_not_fit_together_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        main(["compare", *words])
    assert said in capsys.readouterr().err
