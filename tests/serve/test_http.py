"""Keys, limits, names of the host, errors that nobody foresaw, and the end of a server."""

import json
import logging
from unittest.mock import Mock

import httpx
import openai
import pytest

from recurra.serve import _http as http
from recurra.serve._http import ServeSettings
from recurra.serve._service import Service

from .conftest import Running

KEYS = ("first-key-0123", "second-key-0123")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_a_key_there_is_nothing_but_health(serving):
    running = serving(api_keys=KEYS)
    client = running.client()
    assert client.get("/health").status_code == 200
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/sessions"), ("GET", "/metrics"), ("POST", "/v1/sessions")):
        for headers in ({}, bearer("first-key-012"), {"authorization": KEYS[0]}, bearer("Ω")):
            encoded = {name: value.encode() for name, value in headers.items()}
            refused = client.request(method, path, headers=encoded, json={} if method == "POST" else None)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        running.openai_client("wrong").models.list()
    assert running.openai_client(KEYS[1]).models.list()


def test_sessions_of_one_key_are_unknown_to_another(serving):
    running = serving(api_keys=KEYS)
    mine, yours = (running.client(**bearer(key)) for key in KEYS)
    assert mine.post("/v1/sessions", json={"name": "a"}).status_code == 201
    mine.post("/v1/sessions/a/feed", json={"text": "secret"})
    unknown = yours.get("/v1/sessions/never").json()["error"] | {"message": ""}
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/transcript", None),
        ("POST", "/feed", {"text": "x"}),
        ("POST", "/generate", {}),
        ("POST", "/fork", {}),
        ("POST", "/rewind", {"position": 0}),
        ("DELETE", "", None),
    ):
        answer = yours.request(method, f"/v1/sessions/a{path}", json=body)
        assert answer.status_code == 404
        assert answer.json()["error"] | {"message": ""} == unknown
    assert yours.get("/v1/sessions").json()["data"] == []
    assert yours.post("/v1/sessions", json={"name": "a"}).status_code == 201
    assert mine.get("/v1/sessions/a").json()["position"] == 6
    assert yours.get("/v1/sessions/a").json()["position"] == 0


def test_bodies_are_bounded_whether_they_say_their_length_or_not(serving):
    client = serving(max_body_bytes=1000).client()
    body = json.dumps({"model": "letters", "prompt": "a" * 2000}).encode()
    headers = {"content-type": "application/json"}
    for content in (body, (body[start : start + 100] for start in range(0, len(body), 100))):
        refused = client.post("/v1/completions", content=content, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize("kind", [None, "text/plain; application/json"])
def test_bodies_that_any_page_could_send_are_refused(serving, kind):
    client = serving().client()
    body, headers = b'{"name": "a"}', {} if kind is None else {"content-type": kind}
    for content in (body, iter([body])):
        refused = client.post("/v1/sessions", content=content, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert client.get("/v1/sessions").json()["data"] == []
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/sessions", content=body, headers=headers).status_code == 201


def test_the_number_of_tokens_is_bounded(serving):
    client = serving(max_tokens=20).client()
    for body in ({"prompt": "a" * 21}, {"prompt": "a", "max_tokens": 21}):
        refused = client.post("/v1/completions", json={"model": "letters", **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_tokens")


def test_other_names_of_the_host_are_refused_without_a_key(serving):
    running = serving()
    foreign = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]:1", "[::1]evil.example", "", "[]"]
    foreign += ["[::1]:80evil.example", "[::1]:80:1", "evil.example[::1]", "[[::1]]", "127.0.0.1]"]
    for host in (*foreign, "localhost:evil.example", "localhost:80:evil.example"):
        assert running.client(host=host).get("/v1/models").status_code == 403
    for host in ("127.0.0.1:1", "LOCALHOST", "[::1]:8000"):
        assert running.client(host=host).get("/v1/models").status_code == 200
    assert serving(api_keys=KEYS).client(host="my.example", **bearer(KEYS[0])).get("/v1/models").status_code == 200


def test_an_error_that_nobody_foresaw_is_500_without_a_traceback(serving, monkeypatch, caplog):
    running = serving()
    monkeypatch.setattr(running.service.sessions, "infos", Mock(side_effect=ValueError("inside")))
    with caplog.at_level(logging.ERROR):
        answer = running.client().get("/v1/sessions")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "inside" not in answer.text
    assert "ValueError: inside" in caplog.text


@pytest.mark.parametrize("place", ["_requests._PromptReport.last", "_requests.Sequence.append", "_engine.gates_of"])
def test_an_error_of_the_model_is_told_in_the_log_alone(serving, monkeypatch, caplog, place):
    client = serving().client()
    client.post("/v1/sessions", json={"name": "a"})
    monkeypatch.setattr(f"recurra.serve.{place}", Mock(side_effect=ValueError("inside")))
    body = {"text": "abc", "max_tokens": 2, "details": True}
    answer = client.post("/v1/sessions/a/generate", json=body | {"stream": False})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "turn_failed")
    events = client.post("/v1/sessions/a/generate", json=body).text
    assert '"finish_reason": "error"' in events
    for said in (answer.text, events):
        assert "the server's log says why" in said
        assert "inside" not in said
    assert "ValueError: inside" in caplog.text


def test_a_full_queue_is_429_with_retry_after(serving):
    running = serving(max_streams=1, max_queue=0)
    client = running.client()
    long = {"model": "letters", "prompt": "a", "max_tokens": 60_000, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = client.post("/v1/completions", json={"model": "letters", "prompt": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            running.openai_client("x").completions.create(model="letters", prompt="b")


def test_a_stop_of_the_server_keeps_what_was_written(tmp_path, models):
    kept = ServeSettings(sessions_file=tmp_path / "s.sqlite")
    with Running(Service(models, kept, threads=1)) as running:
        client = running.client()
        client.post("/v1/sessions", json={"name": "a"})
        with client.stream("POST", "/v1/sessions/a/generate", json={"max_tokens": 60_000}) as answer:
            lines = answer.iter_lines()
            heard = [next(lines) for _ in range(31)]
            running.__exit__()
    last = json.loads([line for line in heard if line.startswith("data: ")][-1].removeprefix("data: "))
    with Running(Service(models, kept, threads=1)) as again:
        assert again.client().get("/v1/sessions/a").json()["position"] >= last["position"] > 5


def test_metrics_count(serving):
    client = serving().client()
    client.post("/v1/completions", json={"model": "letters", "prompt": "abcd", "max_tokens": 7})
    client.get("/v1/sessions/none")
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(lines["recurra_tokens_read_total"]) == 3
    assert float(lines["recurra_tokens_written_total"]) == 7
    assert float(lines['recurra_requests_total{route="/v1/sessions/{name}",status="404"}']) == 1
    assert float(lines["recurra_first_token_seconds_count"]) == 1
    assert float(lines["recurra_step_seconds_count"]) == 7


def test_the_page_is_served_from_memory_and_missed_politely(serving, monkeypatch):
    files = {"index.html": b"<p>hello", "assets/a.js": b"1"}
    monkeypatch.setattr(http, "PAGE", tuple(files))
    monkeypatch.setattr(http, "page_file", files.get)
    http._page_files.cache_clear()
    client = serving().client()
    assert client.get("/").text == "<p>hello"
    assert "javascript" in client.get("/assets/a.js").headers["content-type"]
    assert client.get("/engine.json").json() == {"engine": "server"}
    for path in ("/../secret", "/%2e%2e/secret", "/assets/../../secret", "//etc/passwd", "/assets"):
        raw = httpx.Request("GET", client.base_url.copy_with(raw_path=path.encode()))
        assert client.send(raw).status_code == 404
    http._page_files.cache_clear()


@pytest.mark.parametrize("path", ["/nothing", "/v1/embeddings", "/v1", "/v1/completions/more", "/assets"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_404_in_openai_s_form(client, method, path):
    answer = client.request(method, path, json={} if method == "POST" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "unknown_url")
    assert error["message"] == f"there is no {method} {path}"


def test_a_wrong_method_is_405(client):
    answer = client.put("/v1/completions", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize("headers", [{"authorization": f"bearer   {KEYS[0]}"}, {"api-key": KEYS[1]}], ids=str)
def test_a_key_comes_in_either_header(serving, headers):
    client = serving(api_keys=KEYS).client(**headers)
    assert client.get("/v1/models", params={"api-version": "2024-10-21"}).status_code == 200
    assert client.get("/v1/models", headers={"authorization": "Bearer other", "api-key": ""}).status_code == 401


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "host is 0.0.0.0, which other machines may reach, without an API key"),
        ({"api_keys": ("short",)}, "an API key"),
        ({"max_streams": 0}, "max_streams is 0"),
        ({"max_connections": 1}, "max_connections is 1; expected at least 2"),
        ({"max_body_bytes": 100, "bodies_bytes": 99}, "bodies_bytes is 99; expected at least 100"),
        ({"header_seconds": 0}, "header_seconds is 0"),
        ({"body_seconds": float("inf")}, "body_seconds is inf"),
        ({"port": 2**16}, "port is 65536; expected a number from 0 to 65,535"),
        ({"port": -1}, "port is -1"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(ValueError, match=said):
        ServeSettings(**settings)
