"""Streams that are read in pieces, batched, forked and cut short are what they would be alone."""

import base64
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.analysis.gates import record_gates
from recurra.serve._model import PausedStream, ServedModel
from recurra.serve._requests import (
    _MOST_CHECKPOINTS,
    LONGEST_CHUNK,
    SHORTEST_CHUNK,
    Request,
    TokenDetails,
    _PromptReport,
)
from recurra.serve._scheduler import Scheduler, _Pace
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


def same_state(place: PausedStream, served: ServedModel, tokens: list[int]) -> bool:
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


def test_streams_of_a_prepared_hybrid_share_a_batch():
    """16 that begin at different times, each as it is alone; the model itself computes no step."""
    served = ServedModel("m", language_model(mixer=["rotary-attention", "mamba2"]), weights="float32")
    calls, rounds, chance = [], Rounds(), random.Random(0)
    served.warm_up()
    turns = []
    served.plain.register_forward_hook(lambda *_: calls.append(1))
    for number in range(16):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice([2, 20, 50]))]
        turns.append(Request(served, served.start, prompt, [asking(40, number, 1.0)]))
        rounds.run(turns[-1], rounds=2)
    rounds.run(rounds=2)
    assert len(rounds.engine._batches) == 1
    assert len(rounds.engine._batches[0]) == 16
    rounds.run()
    assert not calls
    for turn in turns:
        stream = Stream(served.runner)
        stream.feed(turn.tokens)
        config = turn.configs[0]
        assert rounds.written(turn) == list(stream.generate(40, sampling=config.sampling, seed=config.seed))
        (end,) = rounds.ends(turn)
        served.plain.require_state(end.state.model_state, 1)


def test_more_rows_than_one_batch_has(exact):
    rounds = Rounds()
    turns = [
        Request(exact, exact.start, [number % VOCABULARY, 3], [asking(2 + number % 3, number)]) for number in range(70)
    ]
    rounds.run(*turns)
    assert all(rounds.written(turn) == alone(exact, turn.tokens, turn.configs[0]) for turn in turns)
    assert rounds.engine.scheduler.n_streams == 0


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


def test_a_compiled_step_writes_what_the_model_does():
    plain, served = (ServedModel("m", language_model(), weights=weights) for weights in (None, "float32"))
    rounds, config = Rounds(), asking(12, temperature=0.0)
    turns = [Request(served, served.start, [number, 5, 7], [config]) for number in range(2)]
    rounds.run(*turns)
    for turn in turns:
        assert rounds.written(turn) == alone(plain, turn.tokens, config)


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


def test_a_stop_cancels_what_is_written_read_and_waiting(exact):
    rounds = Rounds(max_streams=2)
    turns = [Request(exact, exact.start, tokens, [asking(1000)]) for tokens in ([1], [1] * 3000, [1])]
    rounds.run(*turns, rounds=4)
    rounds.engine._end_all()
    assert [[end.reason for end in rounds.ends(turn)] for turn in turns] == [["cancelled"]] * 3
    assert not rounds.engine.is_busy
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
    long = Request(exact, exact.start, [1] * 6000, [])  # more than 20 pieces of 256
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


MODEL, OTHER = object(), object()


def asked(n_tokens: int, model=MODEL, n_sequences: int = 1) -> Request:
    """A turn that reads `n_tokens` before its last one."""
    return Request(model, PausedStream(None), [0] * (n_tokens + 1), [None] * n_sequences)


def test_places_are_given_in_order_and_a_large_turn_is_not_overtaken():
    scheduler = Scheduler(4, 8)
    first, large, small = asked(0, n_sequences=3), asked(0, n_sequences=3), asked(0)
    for one in (first, large, small):
        scheduler.add(one)
    assert list(scheduler.admit()) == [first]
    assert (scheduler.n_streams, scheduler.n_waiting) == (3, 2)
    scheduler.release(None, 3)
    assert list(scheduler.admit()) == [large, small]


def test_all_requests_are_dropped_and_those_that_were_admitted_are_known():
    scheduler = Scheduler(1, 8)
    first, second = asked(5), asked(5)
    for one in (first, second):
        scheduler.add(one)
    scheduler.add_background(asked(5))
    assert not list(scheduler.admit())  # the first has something to read
    assert scheduler.drop(lambda _: True) == [(second, False), (first, True)]
    assert scheduler.is_idle


def test_a_turn_keeps_a_bounded_number_of_marks():
    one, places = asked(0), [PausedStream(None, (), n) for n in range(1000)]
    one.checkpoint_every = 16
    for place in places:
        if place.position % one.checkpoint_every == 0:
            one.add_checkpoint(place)
        assert len(one.checkpoints) < _MOST_CHECKPOINTS
    one.checkpoint_every = 1
    for place in places:
        one.add_checkpoint(place)
        assert len(one.checkpoints) < _MOST_CHECKPOINTS
    assert one.checkpoints[-1] is places[-1]
    assert one.checkpoint_every > 16


def test_short_prompts_are_read_side_by_side_and_models_apart():
    scheduler = Scheduler(8, 8)
    same, longer, foreign, shorter = asked(20), asked(40), asked(20, OTHER), asked(17)
    for one in (same, longer, foreign, shorter):
        scheduler.add(one)
    list(scheduler.admit())
    piece = scheduler.next_chunk(False)
    assert (piece.requests, piece.length) == ([same, longer], 20)
    assert scheduler.complete(piece) == [same]
    assert longer.n_left == 20


def test_only_whole_prompts_are_read_in_pieces_that_are_too_short():
    scheduler = Scheduler(64, 8)
    short, longer, twin = asked(5), asked(9), asked(5)
    for one in (short, longer, twin, *(rest := [asked(n) for n in range(17, 50)])):
        scheduler.add(one)
    list(scheduler.admit())
    piece = scheduler.next_chunk(False)
    assert (piece.requests, piece.length) == ([short, twin], 5)
    while piece is not None:
        assert piece.length >= SHORTEST_CHUNK or all(one.n_left == piece.length for one in piece.requests)
        assert piece.length < 2 * SHORTEST_CHUNK or piece.n_tokens <= LONGEST_CHUNK
        scheduler.complete(piece)
        piece = scheduler.next_chunk(False)
    assert not any(one.n_left for one in rest)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.booleans(), st.integers(1, 5000))
def test_everything_is_read_once_within_the_bound(lengths, somebody_writes, microseconds):
    scheduler = Scheduler(64, 64)
    scheduler.pace.note_chunk(1, microseconds * 1e-6)
    scheduler.pace.note_step(0.03)
    turns = [asked(length) for length in lengths]
    for one in turns:
        scheduler.add(one)
    list(scheduler.admit())
    done, n_read = [], 0
    while (piece := scheduler.next_chunk(somebody_writes)) is not None:
        room = scheduler.pace.chunk_tokens(8 * 12) if somebody_writes else LONGEST_CHUNK
        assert 0 < len(piece.requests) * piece.length <= max(room, 2 * SHORTEST_CHUNK - 1)
        n_read += len(piece.requests) * piece.length
        done += scheduler.complete(piece)
    assert n_read == sum(lengths)
    assert sorted(map(id, done)) == sorted(map(id, turns))
    assert scheduler.is_idle


def test_a_piece_takes_as_long_as_a_step():
    pace = _Pace()
    assert pace.chunk_tokens(1) == SHORTEST_CHUNK
    pace.note_chunk(100, 0.05)
    pace.note_step(0.03)
    assert [pace.chunk_tokens(n_steps) for n_steps in (1, 1.5, 100)] == [60, 90, LONGEST_CHUNK]
    for _ in range(100):
        pace.note_step(0.0001)
    assert pace.chunk_tokens(1) == SHORTEST_CHUNK


@pytest.mark.parametrize(("owner", "n_together"), [("me", 6), ("another", 2)])
def test_many_prompts_may_delay_the_few_streams_of_their_owner(owner, n_together):
    """One stream is written; six prompts, of half a step each, wait."""
    scheduler = Scheduler(64, 64)
    scheduler.pace.note_chunk(20, 0.01)
    scheduler.pace.note_step(0.02)
    written, *waiting = requests = [asked(0), *(asked(20) for _ in range(6))]
    written.owner = "me"
    for one in waiting:
        one.owner = owner
    for one in requests:
        scheduler.add(one)
    list(scheduler.admit(True))
    piece = scheduler.next_chunk(True)
    assert (len(piece.requests), piece.length) == (n_together, 20)
