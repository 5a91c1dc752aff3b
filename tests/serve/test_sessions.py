"""Sessions over HTTP: what they read and write, forks, and what is left after a restart."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator

import httpx
import pytest
import torch

from recurra.serve._http import ServeSettings
from recurra.serve._model import PausedStream
from recurra.serve._service import Service
from recurra.serve._sessions import _MOST_CHECKPOINTS, _Checkpoints
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

from .conftest import Letters, Running


def opened(client: httpx.Client, **body) -> str:
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def write(client: httpx.Client, name: str, n: int = 6, **body) -> list[int]:
    body = {"max_tokens": n, "temperature": 0, "stream": False, **body}
    answer = client.post(f"/v1/sessions/{name}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["tokens"] if token["from"] == "written"]


def events(response: httpx.Response) -> list[tuple[str, dict]]:
    blocks = [block.split("\r\n") for block in response.read().decode().strip().split("\r\n\r\n")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in blocks]


def alone(models, text: str, n: int) -> list[int]:
    stream = Stream(models[0].plain)
    stream.feed(Letters().encode(text))
    return list(stream.generate(n, sampling=SamplingConfig(temperature=0.0)))


def test_a_session_reads_and_writes_like_a_stream(client, models):
    name = opened(client)
    fed = client.post(f"/v1/sessions/{name}/feed", json={"text": "hello"}).json()
    assert (fed["finish_reason"], fed["position"]) == ("read", 5)
    first = write(client, name, text=" there")
    assert first == alone(models, "hello there", 6)
    text = "hello there" + Letters().decode(first)
    assert write(client, name) == alone(models, text, 6)
    told = client.get(f"/v1/sessions/{name}/transcript").json()
    assert [token["position"] for token in told["tokens"]] == list(range(1, 24))
    assert "".join(token["text"] for token in told["tokens"]).startswith(text)
    assert [token["from"] for token in told["tokens"][10:12]] == ["read", "written"]
    part = client.get(f"/v1/sessions/{name}/transcript", params={"start": 5, "limit": 3}).json()
    assert part["tokens"] == told["tokens"][5:8]


def test_penalties_count_the_tokens_of_one_request(client, models):
    body = {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    name, stream = opened(client), Stream(models[0].plain)
    stream.feed(Letters().encode("hello"))
    config = SamplingConfig(presence_penalty=1.0, frequency_penalty=0.5, logit_bias={2: 3.0})
    for text in ({"text": "hello"}, {}):
        written = write(client, name, 12, **text, **body, logit_bias={"2": 3})
        assert written == list(stream.generate(12, sampling=config, seed=3))


def test_a_stream_of_events_ends_with_the_end(client):
    name = opened(client, model="numbers")
    body = {"tokens": [1, 2], "max_tokens": 3, "seed": 1, "alternatives": 2, "details": True, "channels": 4}
    told = events(client.post(f"/v1/sessions/{name}/generate", json=body))
    assert [kind for kind, _ in told] == ["token"] * 5 + ["end"]
    assert [event["position"] for _, event in told] == [1, 2, 3, 4, 5, 5]
    assert [event.get("from") for _, event in told] == ["read"] * 2 + ["written"] * 3 + [None]
    assert told[0][1]["logprob"] is None
    assert all(len(event["alternatives"]) == 2 for _, event in told[1:5])
    assert all(len(event["gates"]["magnitudes"][1]) == 8 for _, event in told[:5])
    assert told[-1][1] == {"finish_reason": "length", "position": 5, "text": ""}


def test_a_fork_continues_from_any_token_and_leaves_the_first_alone(client, models):
    name = opened(client)
    written = write(client, name, 40, text="the quick brown fox")
    whole = "the quick brown fox" + Letters().decode(written)
    for position in (0, 1, 7, 19, 33, 59):
        twin = client.post(f"/v1/sessions/{name}/fork", json={"position": position}).json()
        assert twin["position"] == position
        start = whole[:position] or "\n"
        assert write(client, twin["id"], 5) == alone(models, start, 5)
    assert client.get(f"/v1/sessions/{name}").json()["position"] == 59
    assert write(client, name, 5) == alone(models, whole, 5)
    too_far = client.post(f"/v1/sessions/{name}/fork", json={"position": 65})
    assert (too_far.status_code, too_far.json()["error"]["param"]) == (400, "position")


def test_a_rewind_forgets_what_came_after(client, models):
    name = opened(client)
    write(client, name, 8, text="abc")
    assert client.post(f"/v1/sessions/{name}/rewind", json={"position": 3}).json()["position"] == 3
    other = write(client, name, 4, text="xyz")
    assert other == alone(models, "abcxyz", 4)
    assert len(client.get(f"/v1/sessions/{name}/transcript").json()["tokens"]) == 10


def test_names_are_unique_and_listed_until_they_are_closed(serving):
    client = serving().client()
    for name in ("b", "a", "c"):
        opened(client, name=name)
    again = client.post("/v1/sessions", json={"name": "a"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")
    page = client.get("/v1/sessions", params={"limit": 2}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["a", "b"], True)
    page = client.get("/v1/sessions", params={"limit": 1, "after": "b"}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["c"], False)
    assert client.delete("/v1/sessions/a").json()["deleted"]
    assert client.delete("/v1/sessions/a").status_code == 404
    assert client.get("/v1/sessions/a").json()["error"]["code"] == "session_not_found"
    assert [one["id"] for one in client.get("/v1/sessions").json()["data"]] == ["b", "c"]


def test_sessions_outlive_the_server(serving, tmp_path, models):
    kept = {"sessions_file": tmp_path / "sessions.sqlite"}
    with first_server(models, kept) as client:
        name = opened(client, name="mine")
        written = write(client, name, 5, text="once")
        more = write(client, name, 5)
    client = serving(**kept).client()
    assert client.get("/v1/sessions/mine").json()["position"] == 14
    whole = "once" + Letters().decode([*written, *more])
    assert write(client, "mine", 5) == alone(models, whole, 5)
    twin = client.post("/v1/sessions/mine/fork", json={"position": 6}).json()["id"]  # no marks are left
    assert write(client, twin, 4) == alone(models, whole[:6], 4)


@contextlib.contextmanager
def first_server(models, kept: dict) -> Iterator[httpx.Client]:
    """A server that ends before another one serves what it has kept."""
    with Running(Service(models, ServeSettings(**kept), threads=1)) as first:
        yield first.client()


def test_sessions_of_a_model_that_is_gone_are_kept_and_refused(serving, tmp_path, models):
    kept = {"sessions_file": tmp_path / "sessions.sqlite"}
    with first_server(models, kept) as client:
        opened(client, name="mine", model="numbers")
    client = serving(models=models[:1], **kept).client()
    assert client.get("/v1/sessions").json()["data"][0]["model"] is None
    refused = client.get("/v1/sessions/mine")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_served")


def test_more_sessions_than_memory_holds(serving, models):
    running = serving(max_resident_sessions=3)
    client = running.client()
    for number in range(10):
        opened(client, name=f"s{number}")
        client.post(f"/v1/sessions/s{number}/feed", json={"text": "abcdefghij"[: number + 1]})
    assert running.service.sessions.n_resident == 3
    for number in (0, 9, 4):
        assert write(client, f"s{number}", 3) == alone(models, "abcdefghij"[: number + 1], 3)
    assert running.service.sessions.n_resident == 3


def test_what_one_turn_forgets_leaves_no_gap_on_the_disk(serving, tmp_path, models):
    kept = {"sessions_file": tmp_path / "sessions.sqlite", "max_tokens": 20}
    with first_server(models, kept) as client:
        opened(client, name="mine")
        for _ in range(4):
            write(client, "mine", 20, text="abcdefghijklmnopqrst")
        told = client.get("/v1/sessions/mine/transcript").json()
    again = serving(**kept).client().get("/v1/sessions/mine/transcript").json()
    assert again["position"] == told["position"] == 160
    n = len(again["tokens"])
    assert n == 160 - again["first"] >= 20
    assert again["tokens"] == told["tokens"][-n:]


@contextlib.contextmanager
def full_disk():
    """Nothing can be written meanwhile."""

    def fails(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recurra.serve._store.write", fails)
        yield


def test_what_the_disk_does_not_take_has_not_happened(serving, models, caplog):
    running = serving()
    client = running.client()
    opened(client, name="a")
    written = write(client, "a", 30, text="once")
    written += write(client, "a", 5)
    before = client.get("/v1/sessions/a/transcript").json()
    with full_disk():
        turns = [
            ("feed", {"text": "xyz"}),
            ("rewind", {"position": 3}),
            ("generate", {"max_tokens": 5, "stream": False}),
        ]
        for path, body in turns:
            answer = client.post(f"/v1/sessions/a/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (507, "server_error")
            assert client.get("/v1/sessions/a/transcript").json() == before
        *told, (kind, end) = events(client.post("/v1/sessions/a/generate", json={"max_tokens": 5}))
        assert (kind, end["finish_reason"], end["position"], len(told)) == ("end", "error", 39, 5)
        assert "could not be written" in end["message"]
    assert "disk is full" in caplog.text
    whole = "once" + Letters().decode(written)
    twin = client.post("/v1/sessions/a/fork", json={"position": 36}).json()["id"]  # from no mark of what was refused
    assert write(client, twin, 5) == alone(models, whole[:36], 5)
    assert write(client, "a", 5) == alone(models, whole, 5)
    assert running.service.sessions.n_resident == 2


def test_a_session_has_one_turn_at_a_time(serving):
    client = serving().client()
    opened(client, name="a")
    with client.stream("POST", "/v1/sessions/a/generate", json={"max_tokens": 60_000}) as long:
        lines = long.iter_lines()  # kept: an iterator that is forgotten hangs up
        next(lines)
        for path, body in (("feed", {"text": "x"}), ("fork", {}), ("rewind", {"position": 0})):
            busy = client.post(f"/v1/sessions/a/{path}", json=body)
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
            assert busy.headers["retry-after"] == "1"
        assert client.delete("/v1/sessions/a").status_code == 409


def test_hanging_up_cancels_and_what_was_written_counts(serving):
    running = serving()
    client = running.client()
    opened(client, name="a")
    with client.stream("POST", "/v1/sessions/a/generate", json={"max_tokens": 60_000, "text": "abc"}) as long:
        lines = long.iter_lines()
        for _ in range(30):
            next(lines)
    while (answer := client.post("/v1/sessions/a/feed", json={"text": "d"})).status_code == 409:
        time.sleep(0.01)
    position = answer.json()["position"]
    assert 4 < position < 60_000
    assert len(client.get("/v1/sessions/a/transcript").json()["tokens"]) == min(position, 10_000)
    assert running.service.engine.scheduler.n_streams == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("feed", {}, "text"),
        ("feed", {"text": "a", "tokens": [1]}, "tokens"),
        ("feed", {"text": "a", "unknown": 1}, "unknown"),
        ("generate", {"stop": [5]}, "stop.0"),
        ("fork", {"name": "../../etc"}, "name"),
    ],
)
def test_bad_requests_are_refused_in_openai_s_form(client, path, body, param):
    name = opened(client)
    answer = client.post(f"/v1/sessions/{name}/{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


def test_a_model_of_classes_answers_and_does_not_write(client, models):
    name = opened(client, model="classes")
    told = client.post(f"/v1/sessions/{name}/feed", json={"tokens": [3, 4], "answers": 7}).json()["tokens"]
    expected = models[2].plain(torch.tensor([[3, 4]]))[0][0].log_softmax(-1)
    for token, row in zip(told, expected, strict=True):
        assert token["logprob"] is None
        assert token["answers"][0]["id"] == int(row.argmax())
        assert token["answers"][0]["logprob"] == pytest.approx(row.max().item(), abs=1e-4)
    refused = client.post(f"/v1/sessions/{name}/generate", json={})
    assert refused.json()["error"]["code"] == "cannot_generate"
    text = client.post(f"/v1/sessions/{name}/feed", json={"text": "a"})
    assert text.status_code == 400


def test_going_back_beyond_the_transcript(serving, models):
    client = serving(max_tokens=20, checkpoint_bytes=0).client()
    opened(client, name="a")
    for _ in range(5):
        client.post("/v1/sessions/a/feed", json={"text": "a" * 20})
    told = client.get("/v1/sessions/a/transcript").json()
    assert told["first"] >= 60
    assert (told["position"], len(told["tokens"])) == (100, 100 - told["first"])
    for path in ("fork", "rewind"):
        refused = client.post(f"/v1/sessions/a/{path}", json={"position": 50})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "position_forgotten")
    assert client.post("/v1/sessions/a/rewind", json={"position": 0}).json()["position"] == 0
    assert write(client, "a", 5, text="abc") == alone(models, "abc", 5)
    assert client.get("/v1/sessions/a/transcript").json()["first"] == 0


def test_a_session_that_went_back_to_its_first_token_knows_its_place(serving, tmp_path, models):
    """Nothing of its transcript is left to keep: only the position says where it stands."""
    kept = {"sessions_file": tmp_path / "sessions.sqlite", "max_tokens": 20}
    with first_server(models, kept) as client:
        opened(client, name="a")
        for _ in range(5):
            client.post("/v1/sessions/a/feed", json={"text": "a" * 20})
        place = client.get("/v1/sessions/a/transcript").json()["first"]
        assert client.post("/v1/sessions/a/rewind", json={"position": place}).json()["position"] == place
    client = serving(**kept).client()
    client.post("/v1/sessions/a/feed", json={"text": "abcde"})
    told = client.get("/v1/sessions/a/transcript").json()
    assert (told["first"], told["position"]) == (place, place + 5)
    refused = client.post("/v1/sessions/a/rewind", json={"position": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "position_forgotten")


def states(*numbers: int) -> list[PausedStream]:
    return [PausedStream(torch.zeros(1, 25), (), number) for number in numbers]


def nearest(checkpoints: _Checkpoints, session: str, position: int) -> PausedStream | None:
    return next(reversed(checkpoints.up_to(session, position)), None)


def test_the_nearest_checkpoint_is_the_last_one_before():
    checkpoints = _Checkpoints(10_000)
    checkpoints.add("a", states(16, 32, 48))
    assert [getattr(nearest(checkpoints, "a", at), "position", None) for at in (15, 16, 40, 99)] == [None, 16, 32, 48]
    checkpoints.cut("a", 32)
    assert nearest(checkpoints, "a", 99).position == 32
    assert nearest(checkpoints, "b", 99) is None


def test_too_many_are_thinned_and_reach_over_the_whole_stream():
    checkpoints = _Checkpoints(1_000_000)
    for start in range(0, 10_000, 160):
        checkpoints.add("a", states(*range(start + 16, start + 161, 16)))
    assert nearest(checkpoints, "a", 10_000).position > 9_900
    assert nearest(checkpoints, "a", 2_000) is not None
    gaps = [at - nearest(checkpoints, "a", at).position for at in range(1_000, 10_000, 100)]
    assert max(gaps) <= 2 * 10_000 / _MOST_CHECKPOINTS * 2


def test_bytes_are_bounded_and_the_longest_unused_session_goes_first():
    checkpoints = _Checkpoints(600)  # six checkpoints of 100 bytes
    checkpoints.add("a", states(1, 2, 3))
    checkpoints.add("b", states(1, 2, 3))
    nearest(checkpoints, "a", 3)
    checkpoints.add("c", states(1, 2))
    assert nearest(checkpoints, "b", 9) is None
    assert nearest(checkpoints, "a", 9) is not None
    assert nearest(checkpoints, "c", 9) is not None
    for name in "abc":
        checkpoints.forget(name)
    assert checkpoints._bytes == 0
