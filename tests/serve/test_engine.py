"""Streams that are read in pieces, batched, forked and cut short are what they would be alone."""

import base64
import random

import pytest
import torch

from recurra.analysis.gates import record_gates
from recurra.serve._model import ServedModel, StreamState
from recurra.serve._requests import Request, TokenDetails, _PromptReport
from recurra.state import tensors
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

from .conftest import VOCABULARY, Letters, Rounds, asking, language_model


def alone(served: ServedModel, tokens: list[int], config) -> list[int]:
    """What a stream writes that has the model for itself, read at once."""
    stream = Stream(served.plain)
    stream.feed(tokens)
    return list(stream.generate(config.max_tokens, sampling=config.sampling, seed=config.seed))


def same_state(place: StreamState, served: ServedModel, tokens: list[int]) -> bool:
    stream = Stream(served.plain)
    stream.feed(tokens[:-1])
    pairs = zip(tensors(place.model_state), tensors(stream.state), strict=True)
    return place.position == len(tokens) and all(torch.allclose(*pair, rtol=1e-9, atol=1e-11) for pair in pairs)


@pytest.mark.parametrize("mixer", ["gateloop", "rotary-attention"])
def test_streams_that_come_and_go_write_what_they_write_alone(mixer):
    """They arrive in the middle of others, with prompts of any length; the attention's states differ in layout."""
    served = ServedModel("m", language_model(mixer=mixer).double())
    chance, rounds = random.Random(0), Rounds()
    turns = []
    for number in range(14):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 7, 30, 270]))]
        config = asking(chance.randint(1, 12), number, chance.choice([0.0, 1.0]))
        turns.append(Request(served, served.start, prompt, [config]))
        rounds.run(turns[-1], rounds=chance.randint(0, 3))
    rounds.run()
    for turn in turns:
        assert rounds.written(turn) == alone(served, turn.tokens, turn.configs[0])
        (end,) = rounds.ends(turn)
        assert end.reason == "length"
        assert same_state(end.state, served, [*turn.tokens, *rounds.written(turn)])


def test_more_rows_than_one_batch_has(exact):
    rounds = Rounds()
    turns = [
        Request(exact, exact.start, [number % VOCABULARY, 3], [asking(2 + number % 3, number)]) for number in range(70)
    ]
    rounds.run(*turns)
    assert all(rounds.written(turn) == alone(exact, turn.tokens, turn.configs[0]) for turn in turns)
    assert rounds.engine.scheduler.n_streams == 0


def test_the_compiled_step_writes_the_same_alone_and_in_a_batch():
    """Bit for bit: a row's result does not depend on the batch."""
    served = ServedModel("m", language_model(), weights="bfloat16")
    prompts = [[number, 5, 7] for number in range(2)]
    config = asking(20, 3)
    single = []
    for prompt in prompts:
        rounds = Rounds()
        turn = Request(served, served.start, prompt, [config], TokenDetails(True))
        rounds.run(turn)
        single.append([(event.id, event.logprob) for event in rounds.tokens(turn) if not event.was_read])
    rounds = Rounds()
    turns = [Request(served, served.start, prompt, [config], TokenDetails(True)) for prompt in prompts]
    rounds.run(*turns)
    # the prompts were read side by side, whose matrix products may round otherwise
    for turn, expected in zip(turns, single):
        told = [(event.id, event.logprob) for event in rounds.tokens(turn) if not event.was_read]
        assert [token for token, _ in told] == [token for token, _ in expected]
        assert [share for _, share in told] == pytest.approx([share for _, share in expected], abs=1e-5)


def test_a_stream_continues_from_where_a_turn_ended(exact):
    rounds, config = Rounds(), asking(6, temperature=0.0)
    first = Request(exact, exact.start, [1, 2, 3], [config])
    rounds.run(first)
    more = Request(exact, rounds.ends(first)[0].state, [4, 5], [config])
    again = Request(exact, rounds.ends(first)[0].state, [], [config])
    rounds.run(more, again)
    heard = [1, 2, 3, *rounds.written(first)]
    assert rounds.written(more) == alone(exact, [*heard, 4, 5], config)
    assert rounds.written(again) == alone(exact, heard, config)


def test_marks_are_places_of_the_stream(exact):
    rounds = Rounds()
    turn = Request(exact, exact.start, list(range(30)) * 20, [asking(50)], checkpoint_every=16)
    rounds.run(turn)
    text = [*turn.tokens, *rounds.written(turn)]
    numbers = [mark.position for mark in turn.checkpoints]
    assert any(number < 600 for number in numbers)
    assert [number for number in numbers if number > 600] == [608, 624, 640]
    for mark in turn.checkpoints:
        assert same_state(mark, exact, text[: mark.position])
        assert list(mark.recent) == text[max(0, mark.position - 64) : mark.position]


def test_surprise_and_alternatives_are_the_model_s(exact):
    text = [int(token) for token in torch.randint(VOCABULARY, (300,), generator=torch.Generator().manual_seed(0))]
    rounds, before = Rounds(), Request(exact, exact.start, text[:5], [])
    rounds.run(before)
    turn = Request(exact, rounds.ends(before)[0].state, text[5:], [asking(4)], TokenDetails(True, 3, 2))
    rounds.run(turn)
    whole = [*text, *rounds.written(turn)]
    logprobs = exact.plain(torch.tensor([whole]))[0][0].log_softmax(-1)
    told = rounds.tokens(turn)
    assert [event.id for event in told] == whole[5:]
    assert [event.was_read for event in told] == [True] * 295 + [False] * 4
    for place, event in enumerate(told, 5):
        assert event.logprob == pytest.approx(logprobs[place - 1, event.id].item(), abs=1e-6)
        top = logprobs[place - 1].topk(3)
        assert [share.id for share in event.alternatives] == top.indices.tolist()
        assert [share.logprob for share in event.alternatives] == pytest.approx(top.values.tolist(), abs=1e-6)
        if event.was_read:
            assert [share.id for share in event.answers] == logprobs[place].topk(2).indices.tolist()


def test_the_first_token_of_a_stream_has_no_surprise_and_classes_have_answers(models):
    served = models[2]
    rounds, turn = Rounds(), Request(served, served.start, [3, 4], [], TokenDetails(True, 2, 7))
    rounds.run(turn)
    expected = served.plain(torch.tensor([[3, 4]]))[0][0].log_softmax(-1)
    for event, row in zip(rounds.tokens(turn), expected, strict=True):
        assert (event.logprob, event.alternatives) == (None, ())
        assert {share.id: share.logprob for share in event.answers} == pytest.approx(
            dict(enumerate(row.tolist())), abs=1e-5
        )


def test_a_stop_ends_the_text_before_it():
    served = ServedModel("m", language_model(), Letters())
    rounds, free = Rounds(), Request(served, served.start, [1, 2], [asking(30)])
    rounds.run(free)
    text = served.tokenizer.decode(rounds.written(free))
    stop = text[10:12]
    turn = Request(served, served.start, [1, 2], [asking(30, stop=(stop,))])
    rounds.run(turn)
    (end,) = rounds.ends(turn)
    assert end.reason == "stop"
    assert "".join(event.text for event in rounds.tokens(turn)) + end.text == text[: text.index(stop)]
    assert end.state.position == 2 + text.index(stop) + len(stop)


def test_cancelled_and_late_turns_end_and_give_their_places_back(exact):
    rounds = Rounds(max_streams=3)
    writing, reading, waiting, late = (
        Request(exact, exact.start, tokens, [asking(1000)]) for tokens in ([1], [1] * 3000, [1], [1])
    )
    other = Request(exact, exact.start, [2], [asking(40)])
    rounds.run(writing, reading, other, waiting, late, rounds=4)
    for turn in (writing, reading, waiting):
        rounds.engine.cancel(turn)
    late.deadline = 0.0
    rounds.run()
    assert [rounds.ends(turn)[0].reason for turn in (writing, reading, waiting, late)] == ["cancelled"] * 3 + [
        "timeout"
    ]
    assert rounds.ends(writing)[0].state.position == 1 + len(rounds.written(writing)) > 1
    assert rounds.ends(reading)[0].state is exact.start
    assert rounds.written(other) == alone(exact, [2], other.configs[0])
    assert rounds.engine.scheduler.n_streams == 0


def test_an_error_ends_its_turns_and_nothing_else(exact, monkeypatch):
    rounds = Rounds()
    bad = Request(exact, exact.start, [1, 2, 3], [], TokenDetails(True))
    good = Request(exact, exact.start, [1], [asking(5)])
    monkeypatch.setattr(_PromptReport, "last", lambda *_: 1 / 0)
    rounds.run(bad, good)
    (end,) = rounds.ends(bad)
    assert (end.reason, end.state) == ("error", exact.start)
    assert rounds.ends(good)[0].reason == "length"
    assert rounds.engine.counters.failed == 1
    assert rounds.engine.scheduler.n_streams == 0


def test_a_row_that_cannot_choose_ends_alone(exact):
    """Its neighbours in the batch write what they write alone, and hear nothing of it."""
    rounds, good = Rounds(), asking(6, 3)
    overflow = GenerationConfig(max_tokens=6, sampling=SamplingConfig(repetition_penalty=1e-320))
    neighbours = [Request(exact, exact.start, [number, 2], [good]) for number in range(3)]
    bad = Request(exact, exact.start, [1, 2], [overflow])
    rounds.run(*neighbours, bad)
    (end,) = rounds.ends(bad)
    assert (end.reason, end.message) == ("error", "with these settings there is no token to choose")
    for turn in neighbours:
        assert rounds.written(turn) == alone(exact, turn.tokens, good)
        (end,) = rounds.ends(turn)
        assert (end.reason, end.message) == ("length", "")
    assert rounds.engine.scheduler.n_streams == 0


@pytest.mark.parametrize("fails", ["choosing", "telling"])
def test_a_step_that_fails_is_not_read_twice(exact, monkeypatch, fails):
    """The place after it is that of the last token that was written, whose state has not read it yet."""
    rounds = Rounds()
    turn = Request(exact, exact.start, [1, 2, 3], [asking(9)], TokenDetails(logprob=fails == "telling"))
    rounds.run(turn, rounds=4)
    written = rounds.written(turn)
    assert 0 < len(written) < 9

    def failing(*_):
        if fails == "telling":
            raise RuntimeError("broken")
        return [ValueError("none")]

    monkeypatch.setattr(
        "recurra.serve._engine.choose" if fails == "choosing" else "recurra.serve._engine.token_logprobs", failing
    )
    rounds.run()
    (end,) = rounds.ends(turn)
    assert end.reason == "error"
    assert rounds.written(turn) == written
    assert same_state(end.state, exact, [1, 2, 3, *written])


def test_a_long_prompt_lets_others_write(exact):
    """Between two tokens of a stream, at most one piece of prompts is read."""
    rounds = Rounds()
    writer = Request(exact, exact.start, [1], [asking(200)])
    rounds.run(writer, rounds=1)
    long = Request(exact, exact.start, [1] * 4000, [])
    rounds.engine.submit(long)
    with torch.inference_mode():
        for _ in range(20):
            before = len(rounds.written(writer)), long.n_read
            rounds.engine.round()
            assert len(rounds.written(writer)) == before[0] + 1
            assert 0 < long.n_read - before[1] <= 256


def test_gates_are_those_of_the_tokens(models):
    served = models[0]
    rounds, turn = Rounds(), Request(served, served.start, [5, 6, 7], [asking(3)], TokenDetails(gates=16))
    rounds.run(turn)
    whole = [5, 6, 7, *rounds.written(turn)]
    record = record_gates(served.plain, torch.tensor([whole]))
    for step, event in enumerate(rounds.tokens(turn)):
        assert event.gates["layers"] == [0, 1]
        for layer in range(2):
            bytes_ = torch.tensor(list(base64.b64decode(event.gates["magnitudes"][layer])))
            assert torch.allclose(bytes_ / 255, record.magnitudes[layer][0, step], atol=0.003)
            turns = torch.tensor(list(base64.b64decode(event.gates["phases"][layer]))) / 256
            apart = (turns - record.phases[layer][0, step] / (2 * torch.pi)).remainder(1)
            assert bool((torch.minimum(apart, 1 - apart) < 0.0025).all())
