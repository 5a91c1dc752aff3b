"""Updates as graphs: on the CPU, `RecordedCapture` repeats a run's operators without its Python, as CUDA graphs do."""

from pathlib import Path

import pytest
import torch
from benchmarks.gpu import graphs as benchmark
from benchmarks.gpu.graphs import Dispatched, RecordedCapture, compared, is_equal
from tests.train.conftest import Batches, ToyModel, on_call, quiet
from torch.optim import SGD

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.train import loop
from recurra.train.evaluate import evaluate
from recurra.train.losses import few_positions
from recurra.train.metrics import read_metrics


@pytest.fixture(autouse=True)
def dispatched():
    """The same kernels for all updates, recorded or not."""
    with Dispatched():
        yield


def with_graphs(trainer):
    trainer.graphs.capture = RecordedCapture()
    return trainer


SETTINGS = {
    "adamw": {"optimizer": {"gradient_clip": 0.5}, "schedule": {"warmup_steps": 6}},
    "sgd": {"optimizer": {"algorithm": "sgd", "transition_learning_rate": 0.01}},
    "averaged": {"accumulate": 3, "averaging": {"start_step": 4}, "epochs": 5},
    "short batches": {"data": {"n_tokens": 3 * 5 * 8 + 1 + 9}, "carry_state": False},
    "bfloat16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_graphs_train_as_eager_updates_do_bit_for_bit(make_trainer, name):
    """A carried state, dropout, tied weights, batches of two lengths, and a learning rate that changes."""
    settings = {"epochs": 2, **SETTINGS[name]}
    eager, graphs = make_trainer("eager", **settings), with_graphs(make_trainer("graphs", **settings))
    capture = graphs.graphs.capture
    for trainer in (eager, graphs):
        trainer.fabric.seed_everything(1, verbose=False)
        trainer.fit(quiet())
    assert capture.n_replays >= 2, "otherwise nothing is tested"
    assert is_equal(compared(graphs), compared(eager))
    groups = [trainer.optimizer.state_dict()["param_groups"] for trainer in (eager, graphs)]
    assert groups[0] == groups[1], "checkpoints are those of eager updates"
    unlike = {"seconds", "tokens_per_second"}
    one, other = (read_metrics(trainer.folder.metrics) for trainer in (eager, graphs))
    assert [{k: v for k, v in row.items() if k not in unlike} for row in one] == [
        {k: v for k, v in row.items() if k not in unlike} for row in other
    ]


@pytest.mark.parametrize("share", [0.6, 0.1])
def test_the_targets_that_count_change_from_update_to_update(make_trainer, monkeypatch, share):
    """Their number weighs losses and penalties; where they are few, positions are padded as on a card."""
    sizes = {"vocab_size": 7, "n_layer": 1, "d_model": 4, "mixer": "gru", "d_channel_mixing": 8}
    monkeypatch.setattr("tests.train.conftest.ToyModel", lambda: LanguageModel(LanguageModelConfig(**sizes)))
    monkeypatch.setattr("recurra.train.loop.few_positions", lambda *given, padded: few_positions(*given, padded=True))
    results = []
    for name in ("eager", "graphs"):
        options = {"accumulate": 2, "activation_penalty": 2.0, "change_penalty": 1.0, "carry_state": False}
        trainer = make_trainer(name, epochs=9, **options)
        draw, generator = trainer.source.batch, torch.Generator().manual_seed(0)

        def batch(epoch, step, draw=draw, generator=generator):
            found = draw(epoch, step)
            counted = torch.rand(found.targets.shape, generator=generator).argsort().argsort() < share * 5
            counted[0, : torch.randint(5, (), generator=generator)] = False
            return found._replace(targets=found.targets.where(counted, IGNORED_TARGET))

        monkeypatch.setattr(trainer.source, "batch", batch)
        capture = with_graphs(trainer).graphs.capture if name == "graphs" else None
        for _ in range(12):
            trainer._update()
        results.append(compared(trainer))
    assert capture.n_replays == 9
    assert is_equal(*results)


@pytest.mark.parametrize("case", benchmark.CASES)
def test_recipes_with_muon_train_alike(case, monkeypatch):
    """GateLoop through a change of the window's length, and CRT-GRU with its memory carried."""
    monkeypatch.setattr(benchmark, "UPDATES", 16)  # the length changes after 10
    monkeypatch.setattr(benchmark, "BATCHES", 8)
    with benchmark.corpus(True) as text:
        found = benchmark.measured(case, text, dry=True)
    assert found["eager_repeats"]
    assert found["equal"], found["evaluation"]
    assert found["graphs"]["forms"] == 2


def test_the_stage_steps_alike(tmp_path):
    found = benchmark.measured("decoding-8", tmp_path, dry=True)
    assert found["eager_repeats"]
    assert (found["equal"], found["distance"]) == (True, 0.0)


def test_a_run_resumes_with_graphs_where_it_stopped(make_trainer):
    settings = {"epochs": 3, "eval_every": 1, "save_every": 7}
    whole = make_trainer("whole", **settings)
    whole.fit(quiet())
    first = with_graphs(make_trainer("parts", scorer=on_call(7), **settings))
    first.fit(quiet())
    assert first.position.step == 7
    first.resume("last")  # the same trainer: its optimiser now keeps its state elsewhere
    first.folder.unlock()
    first.fit(quiet())
    assert is_equal(compared(first), compared(whole))


class Spied(RecordedCapture):
    """It keeps those that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Spied] = []

    def fresh(self) -> "Spied":
        self.made.append(Spied())
        return self.made[-1]


def test_validation_is_captured_too_and_leaves_the_carried_state_alone(make_trainer):
    """The state is an output of a graph, whose memory a replay within the same pool would spoil."""
    settings = {"epochs": 2, "eval_every": 3}
    eager, trainer = make_trainer("eager", **settings), make_trainer("graphs", **settings)
    trainer.graphs.capture = capture = Spied()
    for each in (eager, trainer):
        each.fabric.seed_everything(1, verbose=False)
        each.fit(quiet())
    assert [one.n_replays for one in capture.made] == [6 * 4], "of 8 batches, all but the first four"
    assert is_equal(compared(trainer), compared(eager))
    assert trainer.scores == eager.scores


def cut(tokens, share: float, sizes) -> Batches:
    """Pieces of these sizes, each of which continues the one before; a share of their targets counts."""
    targets = tokens.roll(-1, 1).where(torch.rand(tokens.shape) < share, IGNORED_TARGET)
    pieces = enumerate(zip(tokens.split(sizes, 1), targets.split(sizes, 1)))
    return Batches(*(Batch(x, y, continues=number > 0) for number, (x, y) in pieces))


SIZES = {"vocab_size": 7, "n_layer": 1, "d_model": 8, "d_channel_mixing": 8}
MODELS = {
    "gru": lambda: LanguageModel(LanguageModelConfig(mixer="gru", **SIZES)),
    "clusters": lambda: TransformerXL(TransformerXLConfig(n_heads=2, segment_length=4, cutoffs=[2, 4], **SIZES)),
    "no shell": ToyModel,
}


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_has_the_same_scores_with_graphs(name, share):
    """A carried state, few targets, a batch that is shorter, and predictions that are observed."""
    torch.manual_seed(0)
    model, capture, seen = MODELS[name](), RecordedCapture(), ([], [])
    source = cut(torch.randint(7, (2, 42)), share, [4] * 10 + [2])
    observe = [None if name == "clusters" else lambda batch, found, kept=kept: kept.append(found) for kept in seen]
    eager = evaluate(model, source, observe=observe[0])
    found = evaluate(model, source, observe=observe[1], capture=capture)
    assert found[:5] == eager[:5]
    assert is_equal(*seen)
    assert capture.n_replays == 6, "of ten batches, one without a state and three before the capture"
    assert model.training


def test_what_cannot_be_captured_is_evaluated_without():
    model, source = ToyModel(), cut(torch.randint(7, (2, 40)), 1.0, [4] * 10)
    with pytest.warns(UserWarning, match="^evaluated without CUDA graphs: it waits") as seen:
        found = evaluate(model, source, capture=Hindered(why="it waits"))
    assert len(seen) == 1
    assert found[:5] == evaluate(model, source)[:5]


class Scaled(SGD):
    """An optimiser that counts its updates in Python."""

    n_updates = 0

    def step(self):
        self.n_updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] / self.n_updates * parameter.grad


def test_the_step_of_an_optimiser_that_counts_in_python_runs_after_the_graph(make_trainer):
    results = []
    for name in ("eager", "graphs"):
        trainer = make_trainer(name, epochs=2)
        trainer.optimizer = Scaled(trainer.optimizer.param_groups)
        trainer.steps_in_graph = False
        if name == "graphs":
            with_graphs(trainer)
        for _ in range(12):
            trainer._update()
        results.append(compared(trainer))
    assert is_equal(*results)


def test_which_optimisers_step_within_the_graph(make_trainer):
    for name, inside in {"adamw": True, "sgd": True, "muon": True}.items():
        assert make_trainer(name, optimizer={"algorithm": name}).steps_in_graph is inside
    assert "soap" not in loop.CAPTURABLE


def test_graphs_on_are_refused_without_a_card(make_trainer):
    with pytest.raises(ValueError, match=r"training\.graphs is on, and there is no CUDA device; expected auto or off"):
        make_trainer(graphs="on")


@pytest.mark.parametrize("hinders", ["compile", "checkpoint_blocks", "processes"])
def test_what_graphs_do_not_go_with(make_trainer, hinders):
    config = make_trainer().config
    n_ranks = 1 + (hinders == "processes")
    if n_ranks == 1:
        setattr(config, hinders, True)
    assert hinders in loop.why_no_graphs(config, torch.device("cuda"), n_ranks)
    assert not loop.why_no_graphs(make_trainer("other").config, torch.device("cuda"), 1)


class Hindered(RecordedCapture):
    """It gives a reason in warm-ups, or fails after so many captures."""

    def __init__(self, why: str = "", error: str = "", after: int = 0) -> None:
        super().__init__()
        self._why, self._error, self._after = why, error, after

    def warm_up(self, run):
        return run(), self._why

    def capture(self, run):
        run_ = super().capture(run)
        if self._error and self.n_captures > self._after:
            raise RuntimeError(self._error)
        return run_


@pytest.mark.parametrize("hindered", [Hindered(why="it waits"), Hindered(error="not permitted\nwhen capturing")])
def test_what_cannot_be_captured_trains_without(make_trainer, hindered, monkeypatch):
    """With a note for auto, whether a warm-up or the capture shows it, and not at all with on."""
    eager, trainer = make_trainer("eager", epochs=1), make_trainer(epochs=1)
    trainer.graphs.capture = hindered
    for each in (eager, trainer):
        each.fabric.seed_everything(1, verbose=False)
        each.fit(quiet())
    assert trainer.graphs.capture is None
    assert hindered.n_replays == 0
    assert is_equal(compared(trainer), compared(eager))
    strict = make_trainer("on")
    strict.config.graphs, strict.graphs.capture = "on", hindered
    with pytest.raises(ValueError, match=r"training\.graphs is on, and (it waits|a call cannot .*not permitted\))"):
        strict.fit(quiet())


def test_few_positions_are_padded_to_a_fourth():
    targets = torch.full((4, 6), IGNORED_TARGET)
    targets[1, 2] = targets[3, 5] = 1
    assert few_positions(targets, 2, padded=False).tolist() == [8, 23]
    padded = few_positions(targets, 2, padded=True).tolist()
    assert padded[:2] == [8, 23]
    assert len(set(padded)) == 6
    assert few_positions(torch.ones(2, 2, dtype=torch.int64), 4, padded=True) is None


def test_the_stage_fails_where_graphs_differ(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(benchmark, "measured", lambda case, *_: {"case": case, "eager_repeats": True, "equal": False})
    with pytest.raises(SystemExit, match="gateloop, crt-gru"):
        benchmark.main(["--dry", "--out", str(tmp_path / "graphs.json")])
