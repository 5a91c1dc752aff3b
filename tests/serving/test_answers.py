"""Events of a round as they go out: one write, a message for each piece, and an error after what came before it."""

import asyncio
import json

import pytest

from recurra.serving.bodies import ChatBody, CompletionBody
from recurra.serving.openai import Chat, Completion
from recurra.serving.requests import EndEvent, Request, TokenEvent

from .conftest import asking


def writes(answer, rounds) -> list[list[str]]:
    """The data of each message, by the write that it goes out in."""

    async def events():
        for some in rounds:
            yield some

    async def collect() -> list[bytes]:
        return [written async for written in answer.stream(events())]

    return [
        [line.removeprefix("data: ") for line in written.decode().split("\r\n\r\n") if line]
        for written in asyncio.run(collect())
    ]


def pieces_of(messages: list[str]) -> list[tuple[int, str]]:
    choices = [json.loads(message)["choices"][0] for message in messages]
    return [(one["index"], one.get("text") or one.get("delta", {}).get("content")) for one in choices]


@pytest.fixture(params=["completion", "chat"])
def answer(request, models):
    served = models[0]
    request_ = Request(served, served.start, [1], [asking(5), asking(5)])
    if request.param == "completion":
        return Completion(request_, CompletionBody(model="letters", prompt="a", n=2))
    return Chat(request_, ChatBody(model="letters", messages=[{"role": "user", "content": "a"}], n=2))


def test_what_came_at_once_goes_out_at_once(answer, models):
    start = models[0].start
    rounds = [
        [TokenEvent(0, 3, "d"), TokenEvent(1, 4, "e")],
        [TokenEvent(0, 5, ""), TokenEvent(1, 6, "g\r\n\n")],
        [EndEvent(0, "length", start, "f"), EndEvent(1, "stop", start)],
    ]
    *told, done = writes(answer, rounds)
    assert done == ["[DONE]"]
    told = told[-3:]  # a chat begins with who speaks
    assert pieces_of(told[0]) == [(0, "d"), (1, "e")]
    assert pieces_of(told[1]) == [(1, "g\r\n\n")]
    assert [json.loads(message)["choices"][0]["finish_reason"] for message in told[2]] == ["length", "stop"]


def test_an_error_comes_after_what_was_written_before_it_and_ends_the_answer(answer, models):
    start = models[0].start
    rounds = [
        [TokenEvent(0, 3, "d"), EndEvent(1, "error", start), TokenEvent(0, 4, "e")],
        [TokenEvent(0, 5, "f")],
    ]
    *_, told, failed = writes(answer, rounds)
    assert pieces_of(told) == [(0, "d")]
    assert json.loads(failed[0])["error"]["code"] == "turn_failed"


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_an_answer_that_was_cut_short_does_not_look_like_its_end(answer, models, reason):
    start = models[0].start
    *told, _ = writes(answer, [[TokenEvent(0, 3, "d"), EndEvent(0, reason, start), EndEvent(1, "stop", start)]])
    reasons = [json.loads(message)["choices"][0]["finish_reason"] for message in told[-1]]
    assert reasons == [None, "length", "stop"]
