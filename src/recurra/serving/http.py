"""What stands before the application: limits, errors in OpenAI's form, refusals, the page's files."""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recurra.checks import require, require_at_least, require_positive, sentence
from recurra.web import PAGE, page_file

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The limits of a server.

    Raises:
        ValueError: a limit is below what can work, or the address is reachable from other machines and there is no key.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 chooses a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys that requests must bring one of; with none, requests need no key."""
    sessions_file: Path | None = None
    """Where sessions are kept; None keeps them in memory, and they end with the server."""
    max_streams: int = 1024
    """Streams that are read or continued at the same time."""
    max_queue: int = 1024
    """Requests that wait for a place; more are refused with 429."""
    max_sessions: int = 100_000
    """Sessions of one key."""
    max_labels: int = 100
    """Copies of one session that are kept under labels."""
    max_resident_sessions: int = 1024
    """Sessions in memory; the least recently used ones beyond are on disk only. Not without a sessions file."""
    max_tokens: int = 65_536
    """Tokens that a request may ask for or bring, and tokens of a session's transcript that are kept."""
    max_body_bytes: int = 4 * 2**20
    """Size of a request."""
    mark_bytes: int = 128 * 2**20
    """Memory for the states that sessions keep along their transcripts, to fork and rewind quickly."""
    grace_seconds: float = 10.0
    """How long requests may still take after a signal to stop; then they end, and their sessions are written."""
    turn_seconds: float = 600.0
    """How long a request may take, queueing included."""

    def __post_init__(self) -> None:
        names = ("max_streams", "max_sessions", "max_labels", "max_resident_sessions", "max_tokens", "max_body_bytes")
        require_at_least(1, **{name: getattr(self, name) for name in names})
        require_at_least(0, max_queue=self.max_queue, mark_bytes=self.mark_bytes)
        require_positive(turn_seconds=self.turn_seconds)
        require(0 <= self.port < 2**16, "port", self.port, "a number from 0 to 65,535")
        for key in self.api_keys:
            require(
                len(key) >= 8 and key.isascii() and key.isprintable(),
                "an API key",
                "one of other form",
                "at least 8 printable ASCII characters",
            )
        if self.host not in LOCAL_HOSTS and not self.api_keys:
            came = f"{self.host}, which other machines may reach, without an API key"
            raise ValueError(sentence("host", came, "127.0.0.1, or a key", "set RECURRA_API_KEY or --api-key-file"))


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what came, what was expected, and how to mend it.
        code: a word for programs.
        param: the field that it is about.
        retry_after: seconds until it makes sense to try again.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return JSONResponse(error_body(self), self.status, headers)


_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


def error_body(error: ApiError) -> dict[str, dict[str, str | None]]:
    """The body of an error."""
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def unknown_session(name: str) -> ApiError:
    """There is no such session, or it is another key's: both look the same."""
    return ApiError(404, f"session is {name!r}, which does not exist; expected an open one", code="session_not_found")


def turn_failed(message: str = "the model failed on this request") -> ApiError:
    """A turn ended with an error."""
    return ApiError(500, message, code="turn_failed")


def number(value: float | None) -> float | None:
    """A log-probability that JSON can hold: rounded, None for NaN, and -9999 for minus infinity, as OpenAI has it."""
    if value is None or math.isnan(value):
        return None
    return round(value, 5) if math.isfinite(value) else -9999.0


LOG = logging.getLogger("recurra.serving")


class BodyTooLarge(HTTPException):
    """A body goes on beyond the limit. FastAPI passes errors of this class on while it reads a body, and no others."""

    code = "too_large"


class Gate:
    """Refuses what must not reach the application, and logs requests.

    Without API keys only requests to a name of this machine pass: a page of another site that resolves its name to
    127.0.0.1 could ask otherwise. Bodies have to say that they are JSON: a browser sends others for a page of any site,
    without asking first, and some versions of FastAPI read them.

    Args:
        app: the application.
        max_body_bytes: size of a body.
        hosts: the names that requests may use; None for any.
        note: called with the route, the status and the seconds of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        hosts: frozenset[str] | None,
        note: Callable[[str, int, float], None],
    ) -> None:
        self._app, self._max_body_bytes, self._hosts, self._note = app, max_body_bytes, hosts, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._passed(scope, receive, sending)
        except Exception:
            LOG.exception("a request failed", extra={"path": scope["path"]})
            if not status:
                await self._refuse(sending, ApiError(500, "the server failed on this request; its log says why"))
        finally:
            route = scope.get("route")
            self._note(getattr(route, "path", "other"), status, time.perf_counter() - start)

    async def _passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host = _name(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            message = f"host is {host[:100]!r}; expected a name of this machine, or a server with an API key"
            await self._refuse(send, ApiError(403, message, code="unknown_host"))
            return
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            await self._refuse(send, self._too_large())
            return
        if scope["method"] == "POST" and (int(length) or "transfer-encoding" in headers):
            kind = headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                message = f"content-type is {kind[:100]!r}; expected application/json"
                await self._refuse(send, ApiError(415, message, code="unsupported_media_type"))
                return
        n_bytes = 0

        async def receiving() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._max_body_bytes:
                raise BodyTooLarge(413, self._too_large().message)
            return message

        await self._app(scope, receiving, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is too large; expected at most {self._max_body_bytes} bytes", code=BodyTooLarge.code
        )

    @staticmethod
    async def _refuse(send: Send, error: ApiError) -> None:
        body = json.dumps(error_body(error)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send(
            {"type": "http.response.start", "status": error.status, "headers": [*headers, (b"connection", b"close")]}
        )
        await send({"type": "http.response.body", "body": body})


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0].lower()


INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
"""Not those of Python's mimetypes, which asks Windows' registry: browsers refuse a script that is text/plain there."""
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by their paths, each with its media type."""
    files = {name: page_file(name) for name in PAGE} | {"engine.json": json.dumps({"engine": "server"}).encode()}
    return {name: (content, _MEDIA_TYPES[PurePosixPath(name).suffix]) for name, content in files.items()}


def page_response(path: str) -> Response:
    """Answer a request for a file of the page; "" is the page itself."""
    found = page_files().get(path or INDEX)
    if found is None:
        return PlainTextResponse("There is nothing here.\n", 404)
    return Response(found[0], media_type=found[1], headers=_HEADERS)
