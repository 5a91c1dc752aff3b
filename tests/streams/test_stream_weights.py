"""A stream through a copy made for decoding: the model's results, its states, and rounding where it was asked for."""

import pytest
import torch

from recurra.decoding.steps import prepare
from recurra.state import tensors
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig
from recurra.streams.speculation import Speculation
from recurra.streams.stream import Stream, Streams

from .conftest import VOCABULARY

pytestmark = pytest.mark.compile  # while torch records, its tracer stands between the shape checks and their tensors


def prepared(model, weights="float32", kind=Stream):
    return kind(model, runner=prepare(model, weights))


def test_float32_gives_the_models_results(model):
    model = model.float()
    plain, fast = Stream(model), prepared(model)
    for length in (1, 1, 7, 1, 1, 12, 1):
        tokens = torch.randint(VOCABULARY, (length,)).tolist()
        torch.testing.assert_close(fast.feed(tokens), plain.feed(tokens), rtol=1e-4, atol=1e-5)
    for mine, other in zip(tensors(fast.state), tensors(plain.state)):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert list(fast.generate(10, seed=3)) == list(plain.generate(10, seed=3))


def test_states_go_from_one_to_the_other(gateloop, tmp_path):
    model = gateloop.float()
    fast, plain = prepared(model, "int8"), Stream(model)
    fast.feed([1, 2, 3])
    fast.save(tmp_path / "state")
    plain.load(tmp_path / "state")
    assert all(map(torch.equal, tensors(plain.state), tensors(fast.state)))
    twin = fast.fork()
    assert torch.equal(twin.step(4), fast.step(4))
    assert not torch.equal(twin.logits, plain.step(4))  # the twin is rounded, too


def test_streams_share_one_copy_and_are_what_each_is_alone(model):
    model = model.float()
    streams, alone = prepared(model, kind=Streams), prepared(model)
    for name in range(5):
        streams.open(name)
    assert len({id(stream.runner) for stream in streams.values()}) == 1
    inputs = {name: torch.randint(VOCABULARY, (2 + name,)).tolist() for name in streams}
    streams.feed(inputs)
    configs = {name: GenerationConfig(max_tokens=4 + 2 * name, seed=name) for name in streams}
    rounds = list(streams.generate(configs))
    for name, config in configs.items():
        alone.reset()
        alone.feed(inputs[name])
        assert list(alone.generate(config.max_tokens, seed=name)) == [r[name] for r in rounds if name in r]
        torch.testing.assert_close(streams[name].logits, alone.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_every_round_of_a_recurrence_is_one_recorded_step(gateloop, weights):
    streams, alone = prepared(gateloop.float(), weights, Streams), prepared(gateloop, weights)
    for name in range(11):
        streams.open(name).feed([name])
    streams.feed({name: [1] for name in streams})  # the first step of this many rows records it
    calls = []
    streams[0].runner.model.register_forward_hook(lambda *_: calls.append(1))
    for _ in streams.generate({name: GenerationConfig(max_tokens=5) for name in streams}):
        pass
    assert not calls
    for name, stream in streams.items():  # bit for bit: a row does not depend on the batch that it is in
        alone.reset()
        for token in (name, *stream.recent[1:]):
            alone.step(token)
        assert torch.equal(stream.logits, alone.logits)
        assert all(map(torch.equal, tensors(stream.state), tensors(alone.state)))


def test_marks_and_drafts_of_compiled_steps(model):
    """Steps that are compiled leave the states alone that marks hold."""
    model, likeliest = model.float(), SamplingConfig(temperature=0.0)
    plain, fast, draft = Stream(model), prepared(model), prepared(model)
    speculation = Speculation(fast, draft, n_drafted=3)
    plain.feed([1, 2, 3])
    speculation.feed([1, 2, 3])
    mark, logits = fast.mark(), fast.logits
    expected = list(plain.generate(9, sampling=likeliest))
    assert list(speculation.generate(9, sampling=likeliest)) == expected
    assert speculation.drafts.n_accepted >= 5  # the last draft is shorter
    fast.rewind(mark)
    assert torch.equal(fast.logits, logits)
    assert list(fast.generate(9, sampling=likeliest)) == expected
