"""Many streams in one process: each is as if it were alone."""

import random

import pytest
import torch

from recurra.generation import SamplingConfig, Stream, Streams
from recurra.state import tensors

from .conftest import VOCABULARY

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def test_streams_that_come_fork_reset_and_go(model):
    """Feeds in random order and of random lengths; whatever was read is written down and read again alone."""
    chance = random.Random(0)
    streams, read = Streams(model), {}
    for name in range(12):
        streams.open(name)
        read[name] = []
    for turn in range(12):
        names = chance.sample(sorted(streams), chance.randint(1, len(streams)))
        inputs = {name: [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))] for name in names}
        for name, logits in streams.feed(inputs).items():
            read[name] = read[name] + inputs[name]
            assert torch.equal(logits, streams[name].logits)
        one, other = chance.sample(sorted(streams), 2)
        event = chance.choice(["fork", "reset", "close", "alone"])
        if event == "fork":
            name = 100 + turn
            streams.fork(one, name)
            read[name] = read[one]
        elif event == "reset":
            streams[one].reset()
            read[one] = []
        elif event == "close":
            streams.close(other)
            del read[other]
        else:
            streams[one].feed([3, 4])
            read[one] = [*read[one], 3, 4]
    assert set(streams) == set(read)
    assert len({streams[name].position for name in streams}) > 3
    for name, stream in streams.items():
        assert stream.position == len(read[name])
        if read[name]:
            alone = Stream(model)
            torch.testing.assert_close(stream.logits, alone.feed(read[name]), **CLOSE)
            for pair in zip(tensors(stream.state), tensors(alone.state), strict=True):
                torch.testing.assert_close(*pair, **CLOSE)
            assert list(stream.fork().generate(3, sampling=SamplingConfig(temperature=0.0))) == list(
                alone.generate(3, sampling=SamplingConfig(temperature=0.0))
            )


def test_it_is_a_mapping_of_streams(gateloop, words):
    streams = Streams(gateloop, words)
    first = streams.open("a")
    second = streams.fork("a", "b")
    assert (list(streams), len(streams), streams["a"], streams["b"]) == (["a", "b"], 2, first, second)
    assert first.tokenizer is second.tokenizer is words
    streams.feed({"a": "the cat", "b": [1, 2, 3, 4]})
    assert (first.position, second.position) == (2, 4)
    streams.close("a")
    assert "a" not in streams


def test_a_name_is_given_once(gateloop):
    streams = Streams(gateloop)
    streams.open("a")
    with pytest.raises(ValueError, match="there is a stream 'a' already"):
        streams.open("a")
    with pytest.raises(ValueError, match="there is a stream 'a' already"):
        streams.fork("a", "a")
    for call in (lambda: streams.fork("z", "b"), lambda: streams.close("z"), lambda: streams.feed({"z": [1]})):
        with pytest.raises(KeyError, match="z"):
            call()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"c": [VOCABULARY]}, IndexError),
        ({"c": torch.tensor([1.5])}, TypeError),
        ({"c": []}, ValueError),
        ({"c": "text"}, ValueError),
    ],
)
def test_one_bad_input_and_nobody_has_read_anything(gateloop, bad, error):
    streams = Streams(gateloop)
    for name in "abc":
        streams.open(name)
    streams.feed({"a": [1]})
    before = streams["a"].logits
    with pytest.raises(error):
        streams.feed({"a": [2], "b": [1, 2], **bad})
    assert [stream.position for stream in streams.values()] == [1, 0, 0]
    assert torch.equal(streams["a"].logits, before)


def test_nothing_to_read_is_no_reason_to_move(gateloop):
    streams = Streams(gateloop)
    streams.open("a")
    streams.open("b")
    before = streams.feed({"a": [1, 2]})["a"]
    logits = streams.feed({"a": [], "b": [4]})
    assert list(logits) == ["a", "b"]
    assert torch.equal(logits["a"], before)
    assert [stream.position for stream in streams.values()] == [2, 1]


def test_training_mode_is_refused(gateloop):
    streams = Streams(gateloop)
    streams.open("a")
    gateloop.train()
    for call in (lambda: Streams(gateloop), lambda: streams.feed({"a": [1]})):
        with pytest.raises(ValueError, match="training mode"):
            call()
