"""Steps as CUDA graphs: on the CPU, `RecordedCapture` repeats a step's operators on memory that it spoils before."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu.graphs import Dispatched, RecordedCapture, is_equal
from tests.decoding.test_recorded_step import Counter, language_model
from tests.train.test_graphs import Hindered

from recurra.decoding import steps
from recurra.decoding.steps import CapturedStep, prepare
from recurra.state import concatenate, map_tensors, tensors
from recurra.streams import Stream


@pytest.fixture(autouse=True)
def dispatched():
    """The same kernels for all steps, recorded or not."""
    with Dispatched():
        yield


class Locked(RecordedCapture):
    """It replays only while no other thread can."""

    step = None

    def _replay(self, calls):
        assert self.step is None or self.step._lock.locked()
        super()._replay(calls)


def captured(model) -> CapturedStep:
    step = CapturedStep(model, 31, Locked())
    step._capture.step = step
    return step


def alike(one, other) -> bool:
    """Whether logits and states are equal."""
    return is_equal(list(tensors(one)), list(tensors(other)))


MIXERS = {"gateloop": {}, "gru": {}, "retnet": {"n_heads": 2}, "s5": {}, "mamba": {}, "short-conv": {}}


@pytest.mark.parametrize("mixer", MIXERS)
@torch.inference_mode()
def test_a_state_is_a_value_whatever_is_read_from_it_later(mixer):
    """Two continuations of one state, in turn; two of them side by side; and the first state again, at the end."""
    model = language_model(mixer, **MIXERS[mixer])
    step, tokens = captured(model), torch.randint(31, (24, 2, 1))
    _, start = model(tokens[0, :1])
    before, heard = map_tensors(torch.clone, start), []
    ours, theirs = [start, start], [start, start]
    for token in tokens:
        for twin in (0, 1):
            logits, ours[twin] = step(token[twin : twin + 1], ours[twin])
            right, theirs[twin] = model(token[twin : twin + 1], theirs[twin])
            heard.append((logits, ours[twin], map_tensors(torch.clone, (right, theirs[twin]))))
    assert alike(*(run(tokens[0], concatenate(list(states))) for run, states in ((step, ours), (model, theirs))))
    assert alike(step(tokens[3, :1], start), model(tokens[3, :1], start)), "kept since the beginning"
    assert alike(start, before)
    assert all(alike((logits, state), right) for logits, state, right in heard), "none has changed since"
    assert step._capture.n_captures == 2
    assert step._capture.n_replays >= 48 + 2


@torch.no_grad()
def test_other_calls_are_the_models_and_any_number_of_streams_is_replayed():
    model, sizes = language_model("gateloop"), (5, 9, 5, 66)
    step = captured(model)
    for size in sizes:
        tokens = torch.randint(31, (size, 4))
        before = step._capture.n_replays
        logits, state = step(tokens[:, :3])
        assert step._capture.n_replays == before, "a prompt from the start"
        right, expected = model(tokens[:, :3])
        assert alike((logits, state), (right, expected))
        found, right = step(tokens[:, 3:], state), model(tokens[:, 3:], expected)
        assert step._capture.n_replays > before
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)  # 9 of 12 rows: other products
    before = step._capture.n_replays
    with torch.enable_grad():
        assert step(tokens[:, 3:], state)[0].requires_grad
    assert step._capture.n_replays == before


def test_streams_write_what_the_model_writes():
    model = language_model("gateloop")
    step = captured(model)
    plain, ours = Stream(model), Stream(model, runner=step)
    for stream in (plain, ours):
        stream.feed([1, 2, 3])
    kept, twin = ours.snapshot(), ours.fork()
    first = list(ours.generate(20, seed=3))
    assert first == list(plain.generate(20, seed=3))
    ours.restore(kept)
    assert list(ours.generate(20, seed=3)) == list(twin.generate(20, seed=3)) == first
    ours.reset()
    plain.reset()
    assert torch.equal(ours.feed([4, 5]), plain.feed([4, 5]))
    assert torch.equal(ours.step(6), plain.step(6))


class Stale(RecordedCapture):
    """It executes nothing."""

    def _replay(self, calls):
        self.n_replays += 1


@pytest.mark.parametrize(
    ("model", "capture", "why"),
    [
        (language_model("rotary-attention", n_heads=2, window=4), RecordedCapture(), "more of its state changes than"),
        (Counter().eval(), RecordedCapture(), "more of its state changes than"),
        (language_model("gateloop"), Hindered(why="it waits"), "it waits"),
        (language_model("gateloop"), Hindered(error="not permitted"), r"a step cannot be captured \(not permitted\)"),
        (language_model("gateloop"), Stale(), "gives other numbers than the model"),
    ],
    ids=["window", "numbers", "waits", "fails", "wrong"],
)
def test_what_cannot_be_captured_runs_as_it_is(model, capture, why):
    with pytest.warns(UserWarning, match=f"^decoding without CUDA graphs: .*{why}") as seen:
        assert steps._captured(model, 31, "auto", capture) is model
    assert len(seen) == 1
    with pytest.raises(ValueError, match=f"graphs is on, and .*{why}"):
        steps._captured(model, 31, "on", capture)


@torch.no_grad()
def test_a_later_number_of_streams_that_fails_runs_as_it_is():
    model, tokens = language_model("gateloop"), torch.randint(31, (2, 5))
    step, state = CapturedStep(model, 31, Hindered(error="out of memory", after=1)), model(tokens[:, :1])[1]
    with pytest.warns(UserWarning, match=r"^steps of 2 streams run without CUDA graphs: .*\(out of memory\)") as seen:
        found = [step(tokens[:, 1:2], state) for _ in range(3)]
    assert len(seen) == 1
    assert all(alike(one, model(tokens[:, 1:2], state)) for one in found)
    assert step._capture.n_replays == 4, "of one stream, when it was checked"


def test_graphs_are_off_unless_asked_for_and_need_a_card(monkeypatch):
    model = language_model("gateloop")
    with pytest.raises(ValueError, match=r"graphs is on, and the model is not on a CUDA device; expected auto or off"):
        prepare(model, graphs="on")
    with pytest.raises(ValueError, match="graphs is 'yes'"):
        prepare(model, graphs="yes")
    card = SimpleNamespace(device=torch.device("cuda", 0))
    model.parameters = lambda: iter([card])
    monkeypatch.setattr(steps, "CapturedStep", lambda model, size, capture: (model, size, capture))
    assert prepare(model, graphs="auto") == (model, 31, None)
    with pytest.raises(ValueError, match="dtype is 'int8'; expected float32, the default, on a card"):
        prepare(model, "int8", graphs="auto")
