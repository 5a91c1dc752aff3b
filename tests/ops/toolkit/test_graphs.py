"""Calls as graphs: on the CPU, `RecordedCapture` repeats a run's operators without its Python, as CUDA graphs do."""

import random
import warnings
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from benchmarks.gpu.graphs import Dispatched, RecordedCapture, is_equal

from recurra.ops._toolkit import graphs as _graphs
from recurra.ops._toolkit.graphs import CudaCapture, GraphedFunction, capture_on


@pytest.fixture(autouse=True)
def dispatched():
    """The same kernels for all calls, recorded or not."""
    with Dispatched():
        yield


def refused(why: str) -> None:
    raise AssertionError(why)


def graphed(function, capture=None, **options) -> GraphedFunction:
    return GraphedFunction(function, capture or RecordedCapture(), **{"refuse": refused, **options})


def test_packed_batches_run_without():
    given = torch.arange(3, device="meta")
    notes = []
    double = graphed(lambda x: 2 * x, refuse=notes.append)
    assert double(given).shape == (3,)
    assert notes == ["a batch has lengths that are read on the host"]


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
        assert cuda.capture.warm_up(waits) == (1, "the model or its loss waits for the device")
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


def test_graphs_are_captured_on_a_card_unless_they_are_off(cuda):
    card = torch.device("cuda", 0)
    assert isinstance(capture_on(card, "auto"), CudaCapture)
    assert capture_on(card, "off") is capture_on(torch.device("cpu"), "on") is None
    assert cuda.capture.fresh() is not cuda.capture
