"""What long runs want: stopping early, traces, other loggers, and the learning-rate range test."""

import io
import json
import math
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from rich.console import Console

from recurra.training import read_metrics
from recurra.training.loggers import MlflowLog
from recurra.training.rate_finder import find_rate
from recurra.training.run_folder import RunFolder


class Scores(NamedTuple):
    loss: float
    accuracy: float | None = None


def quiet() -> Console:
    return Console(file=io.StringIO())


def scorer(*losses):
    left = iter(losses)
    return lambda model, source: Scores(float(next(left)))


@pytest.mark.parametrize(("losses", "step"), [((5, 4, 4.5, 4.2, 3, 3, 3, 3), 4), ((5, 4, 4.5, 3, 3.5, 3.2, 9, 9), 6)])
def test_a_run_stops_when_evaluations_no_longer_improve(make_trainer, losses, step):
    trainer = make_trainer(scorer=scorer(*losses), epochs=1, eval_every=1, patience=2)
    trainer.fit(quiet())
    assert trainer.position.step == step
    assert trainer.finished
    again = make_trainer(scorer=scorer(), epochs=1, eval_every=1, patience=2)
    again.resume("last")
    assert again.finished


@pytest.mark.parametrize(
    ("monitor", "enough", "step"), [("loss", 3.0, 4), ("loss", 0.1, 8), ("accuracy", 0.5, 3), ("accuracy", 1.0, 8)]
)
def test_a_run_stops_when_it_is_good_enough(make_trainer, monitor, enough, step):
    scores = iter(zip((5, 4, 4.5, 3, 2, 2, 2, 2), (0, 0.25, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5), strict=True))
    settings = {"max_steps": 8, "eval_every": 1, "monitor": monitor, "stop_at": enough}
    trainer = make_trainer(scorer=lambda model, source: Scores(*map(float, next(scores))), **settings)
    trainer.fit(quiet())
    assert trainer.position.step == step
    again = make_trainer(**settings)
    again.resume("last")
    assert again.finished


def test_patience_counts_evaluations_whatever_is_between_them(make_trainer):
    """The best is of step 3; the evaluations of steps 6 and 7, where the run was to end, were two."""
    first = make_trainer(scorer=scorer(1, 2, 2), max_steps=7, eval_every=3, patience=3)
    first.fit(quiet())
    again = make_trainer(scorer=scorer(2), epochs=2, eval_every=1, patience=3)
    again.resume("last")
    assert not again.finished
    again.fit(quiet())
    assert again.position.step == 8
    assert again.finished


def test_the_evaluation_that_ends_a_run_does_not_swallow_its_last_record(make_trainer):
    trainer = make_trainer(scorer=scorer(1, 2), epochs=1, eval_every=3, log_every=4, patience=1)
    trainer.fit(quiet())
    rows = read_metrics(trainer.folder.metrics)
    assert [(row["step"], bool(row["train_loss"]), bool(row["valid_loss"])) for row in rows] == [
        (3, False, True),
        (4, True, False),
        (6, True, True),
    ]


def test_a_trace_has_the_steps_after_the_first_three(make_trainer):
    trainer = make_trainer(epochs=1, profile=2, eval_every=100)
    trainer.fit(quiet())
    events = json.loads(trainer.folder.trace.read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}


def test_wandb_gets_every_record_under_the_name_of_the_run(make_trainer, monkeypatch):
    got = []
    run = SimpleNamespace(
        id="a1", log=lambda values, step: got.append((step, values)), finish=lambda: got.append("finished")
    )
    wandb = SimpleNamespace(init=lambda **options: got.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"epochs": 1, "log_every": 4, "eval_every": 100, "logger": ["wandb"]}
    make_trainer("mine", **settings).fit(quiet())
    options, first, last, finished = got
    assert (options["name"], options["id"]) == ("mine", None)  # two runs of one name have pages of their own
    assert options["config"]["training"]["log_every"] == 4
    assert (first[0], last[0], finished) == (4, 8, "finished")
    assert first[1].keys() >= {"train_loss", "learning_rate"}
    longer = make_trainer("mine", **{**settings, "epochs": 2})
    longer.resume("last")
    longer.fit(quiet())
    assert (got[4]["id"], got[4]["resume"]) == ("a1", "allow")


def test_mlflow_keeps_a_run(make_trainer, monkeypatch, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking", reason="needs the extra loggers: pip install recurra[loggers]")
    pytest.importorskip("sqlalchemy", reason="without a server, MLflow needs SQLAlchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trainer = make_trainer("mine", epochs=1, log_every=4, eval_every=100, logger=["mlflow"])
    config = {"training": {"log_every": 4}}
    try:
        trainer.fit(quiet())
    except ImportError as error:
        pytest.skip(f"without a server, MLflow needs more: {error}")
    log = MlflowLog(trainer.folder, config)  # killed after step 8, resumed at 4
    for step in (8, 12):
        log.write({"step": step, "train_loss": 0.5})
    log.close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{trainer.folder.path / 'mlflow.db'}")
    MlflowLog(RunFolder(tmp_path / "other" / "mine"), config).close()  # of the same name
    client = tracking.MlflowClient(tracking_uri=uri)
    number = client.get_experiment_by_name("recurra").experiment_id
    other, run = client.search_runs([number], order_by=["attributes.start_time DESC"])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train_loss")] == [4, 8, 12]
    assert (run.info.run_name, other.info.run_name) == ("mine", "mine")
    assert client.get_metric_history(other.info.run_id, "train_loss") == []


def test_a_run_that_the_mlflow_server_does_not_know_begins_anew(monkeypatch, tmp_path):
    """With a client that stands in for the package's, so that the test does without it."""
    runs: dict[str, list[int]] = {}
    unknown = type("MlflowException", (Exception,), {})

    class Client:
        def __init__(self, tracking_uri):
            pass

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="1")

        def create_run(self, experiment, run_name):
            number = f"run-{len(runs)}"
            runs[number] = []
            return SimpleNamespace(info=SimpleNamespace(run_id=number))

        def get_run(self, number):
            if number not in runs:
                raise unknown(number)
            return SimpleNamespace(data=SimpleNamespace(metrics={"loss": 0.0} if runs[number] else {}))

        def get_metric_history(self, number, name):
            return [SimpleNamespace(step=step) for step in runs[number]]

        def update_run(self, number, status):
            assert (number in runs, status) == (True, "RUNNING")

        def log_metric(self, number, name, value, step):
            runs[number].append(step)

        def log_param(self, number, name, value):
            pass

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", SimpleNamespace(MlflowException=unknown))
    folder = RunFolder(tmp_path)
    MlflowLog(folder, {}).write({"step": 4, "loss": 1.0})
    log = MlflowLog(folder, {})
    for step in (4, 8):
        log.write({"step": step, "loss": 1.0})
    assert runs == {"run-0": [4, 8]}
    runs["elsewhere"] = runs.pop("run-0")
    MlflowLog(folder, {}).write({"step": 12, "loss": 1.0})
    assert runs == {"elsewhere": [4, 8], "run-1": [12]}
    folder.tracking.write_text("{")
    with pytest.raises(ValueError, match="a resumed run then begins a new page in its trackers"):
        MlflowLog(folder, {})


def test_the_rate_test_raises_the_rates_and_ends_when_the_loss_does_not_fall(make_trainer):
    trainer = make_trainer(epochs=50, optimizer={"learning_rate": 0.01})
    rates = []
    trainer.optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    found = find_rate(trainer, lowest=0.01, highest=1e5, n_steps=40)
    assert rates[0] == pytest.approx(1e-4)
    ratios = [after / before for before, after in pairwise(rates)]
    assert ratios == pytest.approx([1e7 ** (1 / 39)] * len(ratios))
    assert found.factors == pytest.approx([rate / 0.01 for rate in rates[: len(found.factors)]])
    assert min(found.losses) < found.losses[0]
    assert found.factors[0] < found.steepest < found.factors[-1]


@pytest.mark.parametrize(
    ("field", "value"), [("patience", 0), ("profile", -1), ("stop_at", 0.0), ("stop_at", -1.0), ("stop_at", math.nan)]
)
def test_impossible_values_are_refused_by_name(make_trainer, field, value):
    with pytest.raises(ValueError, match=rf"^training\.{field} is "):
        make_trainer(**{field: value})


def test_recomputing_blocks_and_pieces_do_not_go_together(make_trainer):
    with pytest.raises(ValueError, match=r"^training\.checkpoint_blocks is True; expected false with"):
        make_trainer(checkpoint_blocks=True, sequence_parallel=2)


def test_pieces_need_as_many_ranks(make_trainer):
    with pytest.raises(
        ValueError, match=r"^training\.sequence_parallel is 2; expected a number that divides the 1 ranks"
    ):
        make_trainer(sequence_parallel=2)
