from dataclasses import replace
from pathlib import Path

import pytest
from tests.summaries import HORIZON, TEXT, TRAINING

from recurra.training import RecipeFamily, read_family
from tools.pages.results import tables

FAMILY = """
common:
  data: {segment_length: 7, batch_size: 2}
  model: {d_model: 8, dropout: 0.4}
axes:
  model:
    xl: {experiment: text-transformer-xl}
    transformer: {experiment: text-transformer-xl, model: {mem_len: 0}}
    crt: {experiment: text-crt, model: {memory: gru}}
  layers: {2-layers: {model: {n_layer: 2}}, 9-layers: {model: {n_layer: 9}}}
  segment: {n7: {data: {bptt_segments: 2}}, n5: {data: {segment_length: 5, bptt_segments: 4}}}
published:
  crt-2-layers-n5: {test_perplexity: 58.26, tables: [2]}
  crt-2-layers-n7: {test_perplexity: 57.0, tables: [2]}
  xl-9-layers-n5: {test_perplexity: 50.0, tables: [3]}
"""


@pytest.fixture
def family(tmp_path: Path) -> RecipeFamily:
    (tmp_path / "family.yaml").write_text(FAMILY)
    return read_family(tmp_path / "family.yaml")


def text_config(experiment="text-crt", segment_length=5, **model):
    return {
        "experiment": experiment,
        "data": {"segment_length": segment_length, "bptt_segments": 1},
        "model": {"n_layer": 2, "d_model": 8, "dropout": 0.1, **model},
        "training": TRAINING,
    }


def test_the_table_of_memory_horizon(make_summary):
    hybrid = {**HORIZON, "model": {"mixer": ["gateloop", "lru"], "mixer_options": {"gateloop": {}}}}
    runs = [
        make_summary("full"),
        make_summary("other", hybrid, finished=False, steps=12, epochs=1.2, scores={}, validation={}, seconds=240.0),
    ]
    assert tables.horizon_table(runs, {"full": 0.43}).splitlines() == [
        "| run | mixer | epochs | valid | test | published test | minutes | precision | seed |",
        "|---|---|---|---|---|---|---|---|---|",
        "| full | gateloop, data | 4 | 0.500 | 0.457 | 0.43 | 2 | 32-true | 3 |",
        "| other | gateloop, lru | 1.2 of 4, **unfinished** | - | - | - | 4 | 32-true | 3 |",
    ]
    assert tables.horizon_table(runs).splitlines()[0].endswith("| test | minutes | precision | seed |")
    assert (
        tables.horizon_table(runs).splitlines()[2] == "| full | gateloop, data | 4 | 0.500 | 0.457 | 2 | 32-true | 3 |"
    )
    assert tables.mixer(make_summary("x", {**HORIZON, "model": {"mixer": "lru", "mixer_options": {}}})) == "lru"


def test_a_table_of_no_runs_or_of_others_is_refused(make_summary):
    with pytest.raises(ValueError, match="that has a summary: add some with `make report RUNS=FOLDER`"):
        tables.horizon_table([])
    with pytest.raises(ValueError, match="x, a run of text-crt; expected one on Memory Horizon"):
        tables.horizon_table([make_summary("x", TEXT)])


def test_versions_and_machines_are_named_once_each(make_summary):
    machine = {"processor": "Zen", "cores": 2, "threads": 1, "gpu": None}
    one = make_summary(versions={"torch": "2.13", "python": "3.11"}, hardware=machine)
    other = make_summary(hardware={**machine, "gpu": "H100"})
    assert tables.measured_on([one, one]) == "Trained with torch 2.13, python 3.11 on Zen, 1 of 2 cores."
    assert tables.measured_on([one, other, make_summary()]) == (
        "Trained with torch 2.13, python 3.11 on Zen, 1 of 2 cores; torch 2 on Zen, 1 of 2 cores, H100; "
        "torch 2 on an unrecorded machine."
    )


@pytest.mark.parametrize(
    ("config", "variant"),
    [
        (text_config(memory="gru"), "crt-2-layers-n5"),
        (text_config(memory="gru", segment_length=7), "crt-2-layers-n7"),
        (text_config("text-transformer-xl", mem_len=0), "transformer-2-layers-n5"),
        (text_config("text-transformer-xl", mem_len=None), "xl-2-layers-n5"),
        (text_config("text-transformer-xl", mem_len=None, n_layer=9, segment_length=7), "xl-9-layers-n7"),
        (text_config(memory="none"), None),
        (text_config(memory="gru", n_layer=3), None),
        (text_config(memory="gru", d_model=16), None),
        (text_config(memory="gru", segment_length=6), None),
        (text_config("text", memory="gru"), None),
    ],
)
def test_the_variant_of_a_run_follows_from_model_and_segment(family, make_summary, config, variant):
    assert tables.variant_of(family, make_summary("x", config)) == variant


def test_the_table_of_a_family(family, make_summary):
    runs = [
        make_summary("long", text_config(memory="gru")),
        make_summary("short", text_config(memory="gru"), epochs=0.5, finished=False, scores={}),
        make_summary("xl", text_config("text-transformer-xl", mem_len=None)),
        make_summary("deep", text_config("text-transformer-xl", mem_len=None, n_layer=9)),
    ]
    assert tables.family_table(family, runs, "*-2-layers-*").splitlines() == [
        "| model | published test | test | valid | epochs | minutes | precision | seed | run |",
        "|---|---|---|---|---|---|---|---|---|",
        "| xl-2-layers-n5 | - | 61.0 | 7.4 | 4 | 2 | 32-true | 3 | xl |",
        "| crt-2-layers-n7 | 57.0 | not run | - | - | - | - | - | - |",
        "| crt-2-layers-n5 | 58.3 | 61.0 | 7.4 | 4 | 2 | 32-true | 3 | long |",
        "| crt-2-layers-n5 | 58.3 | - | 7.4 | 0.5 of 4, **unfinished** | 2 | 32-true | 3 | short |",
    ]
    assert len(tables.family_table(family, runs).splitlines()) == 7
    assert tables.variants_without_runs(family, runs) == ["crt-2-layers-n7"]
    assert tables.variants_without_runs(family, []) == ["xl-9-layers-n5", "crt-2-layers-n7", "crt-2-layers-n5"]
    assert tables.variants_without_runs(family, [], "xl-*") == ["xl-9-layers-n5"]


TASKS = """
common: {experiment: state-tracking, model: {n_layer: 2, d_model: 8}}
axes:
  mixer: {gru: {model: {mixer: gru}}, min-gru: {model: {mixer: min-gru}}, lru: {model: {mixer: lru}}}
  task: {parity: {data: {task: parity}}, words: {data: {task: words-s3}}}
"""


def test_the_table_of_tasks(tmp_path, make_summary):
    (tmp_path / "tasks.yaml").write_text(TASKS)
    tasks = read_family(tmp_path / "tasks.yaml")

    def run(name, task, mixer, seed, scaled):
        config = {
            "experiment": "state-tracking",
            "data": {"task": task},
            "model": {"n_layer": 2, "d_model": 8, "mixer": mixer},
            "training": {**TRAINING, "seed": seed},
        }
        scores = {} if scaled is None else {"eval-test": {"scaled_accuracy": scaled, "changes": {}}}
        return make_summary(name, config, scores=scores)

    runs = [
        run("b", "parity", "gru", 1, 0.98765),
        run("a", "parity", "gru", 0, 1.0),
        run("c", "words-s3", "min-gru", 0, 0.25),
        run("d", "parity", "lru", 0, None),
    ]
    assert tables.task_table(tasks, runs, ["parity", "words"], "scaled_accuracy").splitlines() == [
        "| mixer | parity | words |",
        "|---|---|---|",
        "| gru | 100.0, 98.8 | - |",
        "| min-gru | - | 25.0 |",
    ]
    with pytest.raises(ValueError, match=r"columns is \['s5'\]; expected ends of the names in gru-parity, gru-words"):
        tables.task_table(tasks, runs, ["s5"])


def test_runs_and_patterns_that_fit_no_variant_are_refused(family, make_summary):
    with pytest.raises(ValueError, match=r"run is odd; expected one of a variant of .*family\.yaml"):
        tables.family_table(family, [make_summary("odd", text_config(memory="none"))])
    with pytest.raises(
        ValueError, match=r"variants is '\*-5-layers-\*'; expected a pattern of some in .*: it has xl-2-layers-n7"
    ):
        tables.family_table(family, [], "*-5-layers-*")


def test_epochs_of_a_finished_and_an_unfinished_run(make_summary):
    assert tables.epochs(make_summary(epochs=0.25)) == "0.25"
    run = make_summary(finished=False, epochs=36.0166, total_epochs=300.0)
    assert tables.epochs(run) == "36 of 300, **unfinished**"
    assert tables.epochs(replace(run, epochs=0.0033)) == "0.0033 of 300, **unfinished**"
