"""Many streams in one process: each is as if it were alone."""

import random

import pytest
import torch

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream, Streams

from .conftest import VOCABULARY

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def test_streams_that_come_fork_reset_and_go(model):
    """Feeds in random order and of random lengths; whatever was read is written down and read again alone."""
    chance = random.Random(0)
    streams, read = Streams(model), {}
    for name in range(8):
        streams.open(name)
        read[name] = []
    for turn in range(8):
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


def test_a_name_is_given_once(gateloop):
    streams = Streams(gateloop)
    streams.open("a")
    with pytest.raises(ValueError, match="name is 'a', an open stream"):
        streams.open("a")
    with pytest.raises(ValueError, match="name is 'a', an open stream"):
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


def test_what_streams_keep_does_not_keep_a_batch_alive(any_model):
    streams = Streams(any_model)
    for name in range(4):
        streams.open(name)
    streams.feed({name: [1, 2, 3] for name in streams})
    streams.feed({name: list(range(1, 5 + 4 * name)) for name in streams})  # the batch shrinks three times
    for stream in streams.values():
        for tensor in (stream.logits, *tensors(stream.state)):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


# --- generating ---

CONFIGS = {
    "ann": GenerationConfig(max_tokens=9, seed=1),
    "bob": GenerationConfig(max_tokens=14, seed=2, sampling=SamplingConfig(temperature=0.7, top_k=9)),
    "cid": GenerationConfig(max_tokens=30, seed=2, stop_tokens=range(0, VOCABULARY, 5)),
    "dan": GenerationConfig(max_tokens=4, sampling=SamplingConfig(temperature=0.0)),
    "eve": GenerationConfig(max_tokens=14, seed=6, sampling=SamplingConfig(repetition_penalty=1.8)),
}


def begun(streams: Streams, names=tuple(CONFIGS)) -> Streams:
    for place, name in enumerate(names):
        streams.open(name)
        streams.feed({name: range(1, 4 + 2 * place)})
    return streams


def alone(stream: Stream, config: GenerationConfig) -> list[int]:
    stop = config.stop_tokens
    return list(stream.generate(config.max_tokens, sampling=config.sampling, seed=config.seed, stop_tokens=stop))


def test_streams_that_generate_together_are_those_alone(model):
    streams = begun(Streams(model))
    twins = {name: stream.fork() for name, stream in streams.items()}
    rounds = list(streams.generate(CONFIGS))
    assert list(rounds[0]) == list(CONFIGS)
    for name, config in CONFIGS.items():
        got = [tokens[name] for tokens in rounds if name in tokens]
        assert got == alone(twins[name], config)
        assert all(name in tokens for tokens in rounds[: len(got)])
        torch.testing.assert_close(streams[name].logits, twins[name].logits, **CLOSE)
        assert (streams[name].position, streams[name].recent) == (twins[name].position, twins[name].recent)
    assert len({sum(name in tokens for tokens in rounds) for name in CONFIGS}) > 2  # they end at different times
    assert list(streams.generate({})) == []


def test_between_rounds_streams_are_fed_closed_and_opened_again(gateloop):
    streams = begun(Streams(gateloop), "abc")
    twins = {name: stream.fork() for name, stream in streams.items()}
    rounds = streams.generate({name: GenerationConfig(max_tokens=6, seed=3) for name in "abc"})
    got = {name: [] for name in "abc"}
    for turn, tokens in enumerate(rounds):
        for name, token in tokens.items():
            got[name].append(token)
            assert streams[name].recent[-1] == token
        if turn == 2:
            streams.close("b")
            streams.open("b")  # another stream of that name, which does not take part
            streams["c"].feed([7, 7])
    expected = alone(twins["c"], GenerationConfig(max_tokens=3, seed=(generator := torch.Generator().manual_seed(3))))
    twins["c"].feed([7, 7])
    expected += alone(twins["c"], GenerationConfig(max_tokens=3, seed=generator))
    assert got["c"] == expected
    assert got["a"] == alone(twins["a"], GenerationConfig(max_tokens=6, seed=3))
    assert got["b"] == alone(twins["b"], GenerationConfig(max_tokens=3, seed=3))
    assert streams["b"].position == 0


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_texts_that_are_generated_together_are_those_alone(kind, request):
    tokenizer = request.getfixturevalue(kind)
    torch.manual_seed(0)
    streams = Streams(LanguageModel(LanguageModelConfig(len(tokenizer), None, 1, 8, 8)).eval(), tokenizer)
    for name in "abc":
        streams.open(name)
    streams.feed({"a": "the dog", "b": "a cat", "c": "the house"})
    stop = "".join(streams["c"].fork().generate_text(40, seed=5))[25:33]
    configs = {
        "a": GenerationConfig(max_tokens=40, seed=1),
        "b": GenerationConfig(max_tokens=25, seed=2, stop_tokens=range(0, len(tokenizer), 9)),
        "c": GenerationConfig(max_tokens=40, seed=5, stop=["never there", stop]),
    }
    twins = {name: stream.fork() for name, stream in streams.items()}
    rounds = list(streams.generate_text(configs))
    got = {name: "".join(pieces.get(name, "") for pieces in rounds) for name in configs}
    for name in "ac":
        config = configs[name]
        text = "".join(twins[name].generate_text(config.max_tokens, stop=config.stop, seed=config.seed))
        assert got[name] == text
        assert streams[name].recent == twins[name].recent
    tokens = alone(twins["b"], configs["b"])
    assert len(tokens) < 25
    assert "a cat" + got["b"] == tokenizer.decode([*tokenizer.encode("a cat"), *tokens])
    assert got["c"]
    assert stop not in got["c"]
    assert all(piece for pieces in rounds for piece in pieces.values())


def test_what_cannot_be_generated_together(gateloop, words):
    streams = begun(Streams(gateloop), "ab")
    streams.open("c")
    before = [stream.recent for stream in streams.values()]
    with pytest.raises(KeyError, match="z"):
        streams.generate({"a": GenerationConfig(), "z": GenerationConfig()})
    with pytest.raises(ValueError, match="the stream is at its start; expected one that has read something"):
        streams.generate({"a": GenerationConfig(), "c": GenerationConfig()})
    with pytest.raises(ValueError, match=r"stop is \('x',\); expected no texts for tokens: call generate_text"):
        streams.generate({"a": GenerationConfig(stop=["x"])})
    with pytest.raises(ValueError, match="tokenizer is None; expected one"):
        streams.generate_text({"a": GenerationConfig()})
    with pytest.raises(ValueError, match="max_tokens is 0; expected at least 1"):
        GenerationConfig(max_tokens=0)
    with pytest.raises(ValueError, match=r"stop is .*; expected texts of at least one letter"):
        begun(Streams(gateloop, words), "a").generate_text({"a": GenerationConfig(stop=[""])})
    assert [stream.recent for stream in streams.values()] == before
