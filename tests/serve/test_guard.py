"""Clients that are slow, without a key, or too many: what they may cost, and that the others still get an answer."""

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator

import openai
import pytest

from recurra.serve import _guard as guard
from recurra.serve._http import ServeSettings

KEYS = ("first-key-0123",)
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half:"
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def connect() -> Iterator:
    """Open sockets to a server, send them some bytes, and close them with the test."""
    with contextlib.ExitStack() as sockets:

        def connect(running, sent: bytes = b"") -> socket.socket:
            made = sockets.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=20))
            made.sendall(sent)
            return made

        yield connect


def received(connection: socket.socket) -> bytes:
    """Receive until the server closes the connection."""
    blocks = []
    with contextlib.suppress(ConnectionResetError):
        while block := connection.recv(65536):
            blocks.append(block)
    return b"".join(blocks)


def answered(connection: socket.socket) -> bytes:
    return connection.recv(65536).partition(b"\r\n")[0]


def post(path: str, length: int, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE + HALF], ids=["nothing", "half", "half of a second request"])
def test_headers_have_limited_time(serving, connect, sent):
    running = serving(header_seconds=0.1)
    connection = connect(running, sent[: len(WHOLE)] if sent.startswith(WHOLE) else sent)
    if sent.startswith(WHOLE):
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        connection.sendall(HALF)
    begun = time.monotonic()
    assert received(connection) == b""
    assert time.monotonic() - begun < 4  # before uvicorn closes idle connections


def test_trickled_headers_get_no_more_time(serving, connect):
    connection = connect(serving(header_seconds=0.1), HALF)
    while not select.select([connection], [], [], 0.005)[0]:
        connection.sendall(b"x")
    assert received(connection) == b""


def test_headers_have_a_limited_size(serving, connect):
    running = serving()
    connection = connect(running)
    with contextlib.suppress(OSError):  # the server closes while we send
        connection.sendall(HALF + b"x" * 2**20)
    assert received(connection).partition(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")
    assert running.client().get("/health").status_code == 200


@pytest.mark.parametrize("sent", [b"", b'{"name": '], ids=["nothing", "half"])
def test_a_body_has_limited_time(serving, connect, sent):
    answer = received(connect(serving(body_seconds=0.1), post("/v1/sessions", 20, sent)))
    assert b"408" in answer.partition(b"\r\n")[0]
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.rpartition(b"\r\n")[2])["error"]["code"] == "body_timeout"


def test_a_long_answer_is_not_bounded_by_the_time_of_bodies(serving, monkeypatch):
    running = serving(header_seconds=1, body_seconds=1)
    engine, run_round = running.service.engine, running.service.engine.round
    monkeypatch.setattr(engine, "round", lambda: (time.sleep(0.3), run_round()))
    body = {"model": "letters", "prompt": "a", "max_tokens": 4}
    begun = time.monotonic()
    assert running.client().post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
    assert time.monotonic() - begun > 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/sessions", "/unknown"])
def test_the_key_is_asked_for_before_the_body(serving, connect, path):
    running = serving(api_keys=KEYS)
    for headers in ((), ("Authorization: Bearer wrong-key-0123",)):
        answer = received(connect(running, post(path, 4_000_000, b"", *headers)))  # no byte of the body
        assert b"401" in answer.partition(b"\r\n")[0]


def test_a_client_that_sends_a_whole_body_without_a_key_sees_the_refusal(serving):
    running = serving(api_keys=KEYS)
    answer = running.client().post("/v1/completions", json={"model": "letters", "prompt": "a" * 3_900_000})
    assert answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        running.openai_client("wrong-key-0123").completions.create(model="letters", prompt="a" * 3_900_000)


def test_the_bodies_of_all_requests_are_bounded_and_released(serving, connect):
    running = serving(max_body_bytes=1000, bodies_bytes=2000)
    held = [connect(running, post("/v1/sessions", 1000, b" " * 999)) for _ in range(2)]
    held.append(connect(running, post("/v1/sessions", 1000, b" " * 999)))
    (refused,), _, _ = select.select(held, [], [], 20)  # whichever the server read last
    answer = received(refused)
    assert b"503" in answer.partition(b"\r\n")[0]
    assert b"retry-after: 1" in answer.lower()
    for connection in set(held) - {refused}:
        connection.sendall(b" ")
        assert b"400" in answered(connection)
    assert running.client().post("/v1/sessions", json={"name": "a"}).status_code == 201


def test_the_bodies_of_a_key_leave_room_for_those_of_another(serving, connect):
    running = serving(api_keys=(*KEYS, "second-key-0123"), max_body_bytes=1000, bodies_bytes=2000)
    sent = post("/v1/sessions", 1000, b" " * 999, f"Authorization: Bearer {KEYS[0]}")
    (refused,), _, _ = select.select([connect(running, sent) for _ in range(2)], [], [], 20)
    assert b"503" in received(refused).partition(b"\r\n")[0]
    client = running.client(authorization="Bearer second-key-0123")
    assert client.post("/v1/sessions", json={"name": "a" * 64}).status_code == 201


def test_the_oldest_idle_connection_makes_room(serving, connect):
    running = serving(max_connections=8)
    half = [connect(running, HALF) for _ in range(20)]
    assert all(received(connection) == b"" for connection in half[:12])
    assert running.client().get("/health").status_code == 200
    half[-1].sendall(b" 1\r\n\r\n")
    assert b"200" in answered(half[-1])


def test_requests_leave_a_place_for_health(serving, connect):
    running = serving(max_connections=8)
    busy = [connect(running, post("/v1/sessions", 100, b"{")) for _ in range(7)]
    deadline = time.monotonic() + 20
    while (refused := running.client().get("/v1/models")).status_code == 200 and time.monotonic() < deadline:
        pass
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"] == "1"
    half = [connect(running, HALF) for _ in range(4)]
    assert running.client().get("/health").status_code == 200
    assert received(half[0]) == b""
    busy[0].close()
    while (again := running.client().get("/v1/models")).status_code == 503 and time.monotonic() < deadline:
        pass
    assert again.status_code == 200


def test_there_are_fewer_connections_than_files(monkeypatch):
    settings = ServeSettings()
    for files, most in ((256, 192), (20_000, 4096), (-1, 4096), (10, 2)):
        monkeypatch.setattr(guard.resource, "getrlimit", lambda _, files=files: (files, files))
        assert guard.most_connections(settings) == most


def test_a_client_that_reads_nothing_is_dropped(serving, connect, monkeypatch):
    content = b"x" * 16 * 2**20  # more than the sockets hold
    monkeypatch.setattr("recurra.serve._http._page_files", lambda: {"index.html": (content, "text/html")})
    running = serving(body_seconds=0.1)
    connection = connect(running, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while running._server.server_state.connections or not running._server.server_state.total_requests:
        time.sleep(0.01)
    assert 0 < len(received(connection)) < len(content)
    assert len(running.client().get("/").content) == len(content)


def test_a_flood_of_pipelined_requests_is_dropped(serving, connect):
    running = serving()
    connection = connect(running)
    with contextlib.suppress(OSError):
        connection.sendall(WHOLE * 5000)
    assert received(connection).count(b"HTTP/1.1 200") < 5000
    assert (
        received(connect(running, WHOLE * 3 + WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).count(
            b"HTTP/1.1 200"
        )
        == 4
    )


def test_large_bodies_give_their_memory_back(serving, monkeypatch):
    trimmed = []
    monkeypatch.setattr(guard, "return_free_memory", lambda: trimmed.append(time.monotonic()))
    monkeypatch.setattr(guard, "_TRIM_SECONDS", 0.05)
    client = serving().client()
    client.post("/v1/sessions", json={"name": "a"})
    for _ in range(3):
        client.post("/v1/sessions", json={"name": "a" * 2**17})
    deadline = time.monotonic() + 20
    while not trimmed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(trimmed) == 1
