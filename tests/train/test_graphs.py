"""Updates as graphs: on the CPU, `RecordedCapture` repeats a run's operators without its Python, as CUDA graphs do."""

import random
import warnings
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from benchmarks.gpu import graphs as benchmark
from benchmarks.gpu.graphs import Dispatched, RecordedCapture, compared, is_equal
from tests.train.conftest import on_call, quiet
from torch.optim import SGD

from recurra.data.batches import IGNORED_TARGET
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train import _graphs
from recurra.train._graphs import CudaCapture, GraphedFunction
from recurra.train.losses import few_positions
from recurra.train.metrics import read_metrics


@pytest.fixture(autouse=True)
def dispatched():
    """The same kernels for all updates, recorded or not."""
    with Dispatched():
        yield


def refused(why: str) -> None:
    raise AssertionError(why)


def graphed(function, capture=None, **options) -> GraphedFunction:
    return GraphedFunction(function, capture or RecordedCapture(), **{"refuse": refused, **options})


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
    settings = {"epochs": 3, **SETTINGS[name]}
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
def test_recipes_with_muon_train_alike(case, tmp_path):
    """GateLoop through a change of the window's length, and CRT-GRU with its memory carried."""
    with benchmark.corpus(True) as text:
        found = benchmark.measured(case, text, dry=True)
    assert found["eager_repeats"]
    assert found["equal"]
    assert found["graphs"]["forms"] == 2


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
    assert "soap" not in _graphs.CAPTURABLE


def test_graphs_on_are_refused_without_a_card(make_trainer):
    with pytest.raises(ValueError, match=r"training\.graphs is on, and there is no CUDA device; expected auto or off"):
        make_trainer(graphs="on")


@pytest.mark.parametrize("hinders", ["compile", "checkpoint_blocks", "processes"])
def test_what_graphs_do_not_go_with(make_trainer, hinders):
    config = make_trainer().config
    n_ranks = 1 + (hinders == "processes")
    if n_ranks == 1:
        setattr(config, hinders, True)
    assert hinders in _graphs.why_no_graphs(config, torch.device("cuda"), n_ranks)
    assert not _graphs.why_no_graphs(make_trainer("other").config, torch.device("cuda"), 1)


class Hindered(RecordedCapture):
    def __init__(self, why: str = "", error: str = "") -> None:
        super().__init__()
        self._why, self._error = why, error

    def warm_up(self, run):
        return run(), self._why

    def capture(self, run):
        run_ = super().capture(run)
        if self._error:
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
    with pytest.raises(ValueError, match=r"training\.graphs is on, and (it waits|an update cannot .*not permitted\))"):
        strict.fit(quiet())


def test_packed_batches_run_without(make_trainer):
    given = torch.arange(3, device="meta")
    notes = []
    double = graphed(lambda x: 2 * x, refuse=notes.append)
    double(given)
    assert notes == ["a batch has lengths that are read on the host"]


# --- the function of trees that is captured ---


def test_numbers_and_tensors_change_and_all_else_is_of_the_form():
    capture = RecordedCapture()
    compute = graphed(lambda x, scale, twice: (x * scale * (2 if twice else 1),), capture)
    for number in range(8):
        for twice in (False, True):
            x, scale = torch.randn(3), float(number)
            (found,) = compute(x, scale, twice)
            assert torch.equal(found, x * scale * (1 + twice))
            x.fill_(torch.nan)  # a graph must not read it later
    assert capture.n_captures == 2


def test_what_python_reads_is_baked_in():
    """Of the stand-in itself: it would show a number that was read on the host."""
    counted = iter(range(100))
    compute = graphed(lambda x: x * next(counted))
    found = [float(compute(torch.ones(()))) for _ in range(6)]
    assert found == [0, 1, 2, 3, 3, 3]


class Pair(NamedTuple):
    newer: torch.Tensor
    older: torch.Tensor


def test_outputs_that_are_inputs_are_copied():
    """A state of windows hands its entries on: filled one by one, the inputs would overwrite each other."""
    steps = graphed(lambda state, x: Pair(state.older + state.newer * x, state.newer))
    other = Pair(torch.zeros(2), torch.ones(2))
    state = other
    for number in range(9):
        state = steps(state, torch.full((2,), float(number)))
        other = Pair(other.older + other.newer * number, other.newer)
        assert is_equal(state, other)


def test_a_bounded_number_of_graphs_and_the_idle_one_gives_way(monkeypatch):
    monkeypatch.setattr(_graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(_graphs, "IDLE", 10)
    capture = RecordedCapture()
    double = graphed(lambda x: 2 * x, capture)

    def call(size: int) -> None:
        x = torch.randn(size)
        assert torch.equal(double(x), 2 * x)

    for _ in range(8):
        for size in (1, 2, 3):  # lengths drawn anew: the third runs without
            call(size)
    assert capture.n_captures == 2
    for _ in range(7):
        call(2)
    call(3)
    assert {form.leaves[0][0] for form in double._graphs} == {(1,), (2,)}
    call(3)
    assert {form.leaves[0][0] for form in double._graphs} == {(2,), (3,)}
    for _ in range(4):
        call(3)
    assert capture.n_captures == 3


def test_a_replay_counts_as_a_change_of_the_weights():
    """Some caches know a tensor by its version, which a graph leaves as it is."""

    class Silent(RecordedCapture):
        def capture(self, run):
            return run(), lambda: None

    weight = torch.ones(2)
    change = graphed(lambda x: weight.add_(x), Silent(), changes=[weight])
    versions = [change(torch.ones(2))._version and weight._version for _ in range(8)]
    assert all(before < after for before, after in pairwise(versions))


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


# --- CUDA's own calls, without a card ---


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        assert other is not self


@pytest.fixture
def cuda(monkeypatch):
    """A `CudaCapture` over stand-ins, which hold no work; the streams that were set are in its list `streams`."""
    main, modes = Stream(), ["default"]

    @contextmanager
    def graph(_graph, *, pool, stream):
        assert (pool, type(stream)) == ("pool", Stream)
        yield

    given = {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: main,
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: modes.append(stream),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: modes.append("replay")),
        "graph": graph,
        "get_sync_debug_mode": lambda: "default",
        "set_sync_debug_mode": modes.append,
    }
    for name, stand_in in given.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = CudaCapture(torch.device("cuda", 0))
    return SimpleNamespace(capture=capture, main=main, modes=modes)


def test_a_warm_up_finds_what_a_replay_would_leave_out(cuda):
    def waits() -> int:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("of the user's own", stacklevel=1)
        return 1

    with pytest.warns(UserWarning, match="of the user's own") as seen:
        assert cuda.capture.warm_up(waits) == (1, "the model or its loss waits for the device within an update")
    assert len(seen) == 1
    assert cuda.modes == ["default", "warn", "default"]
    assert cuda.capture.warm_up(lambda: 2) == (2, "")
    for draw in (random.random, lambda: torch.rand(1)):
        assert cuda.capture.warm_up(draw)[1] == "the model draws random numbers on the host"


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda):
    outputs, replay = cuda.capture.capture(lambda: 3)
    replay()
    assert (outputs, cuda.modes[-1]) == (3, "replay")

    def fails() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cuda.capture.capture(fails)
    assert cuda.modes[-1] is cuda.main
