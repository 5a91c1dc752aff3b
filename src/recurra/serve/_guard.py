"""What a client has to get past: connections, hosts, keys and bodies, each within limits of number, size and time."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recurra._process import return_free_memory
from recurra.serve._http import LOCAL_HOSTS, ApiError, ServeSettings, page_paths

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:  # that of httptools, where it is installed
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _Protocol

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_LOG = logging.getLogger("recurra.serve")

_OTHER_FILES = 64
"""That the process may have open beside its connections."""
_MOST_HEADER_BYTES = 2**16
_MOST_PIPELINED = 16
_LARGE = 2**16
"""Bodies above this are parsed one at a time with a pause before each, and their memory is returned."""
_PAUSE_SECONDS = 0.02
_TRIM_SECONDS = 5.0


def most_connections(settings: ServeSettings) -> int:
    """Return how many connections may be open: `max_connections`, or as many as the limit of open files allows."""
    files = -1 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return settings.max_connections if files < 0 else max(2, min(settings.max_connections, files - _OTHER_FILES))


class Connection(_Protocol):
    """A connection of uvicorn, which itself waits without end for headers, and for a client that reads no response.

    If too many are open, the one that has waited longest for a request is closed.
    """

    def __init__(self, settings: ServeSettings, idle: dict["Connection", None], **options: Any) -> None:
        super().__init__(**options)
        self._settings, self._idle, self._most = settings, idle, most_connections(settings)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._n_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle[self] = None
        self._start_header_timer()
        if len(self.connections) > self._most:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.pop(self, None)
        self._stop_header_timer()
        self._stop_write_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._has_request():
            self._idle.pop(self, None)
            self._stop_header_timer()
            self._n_header_bytes = 0
            if len(getattr(self, "pipeline", ())) > _MOST_PIPELINED:  # h11 parses none ahead
                self.transport.abort()
            return
        self._n_header_bytes += len(data)
        if self._n_header_bytes > _MOST_HEADER_BYTES:
            self.send_400_response("The headers are too large.")
        elif self._header_timer is None:
            self._start_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._has_request():  # in the pipeline
            self._idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_write_buffer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._settings.header_seconds, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _watch_write_buffer(self, before: int | None = None) -> None:
        """Close the connection as soon as the client has read nothing for `body_seconds`."""
        size = self.transport.get_write_buffer_size()
        if size == before:
            self.transport.abort()
        else:
            self._write_timer = self.loop.call_later(self._settings.body_seconds, self._watch_write_buffer, size)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _Bodies:
    """What the bodies of all requests share: a number of bytes by owner, and the turn to be parsed."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.n_bytes: Counter[str | None] = Counter()
        self.turn = asyncio.Lock()
        self._trimming: asyncio.TimerHandle | None = None

    def require_room(self, owner: str | None) -> None:
        most = self.settings.bodies_bytes
        most_own = max(self.settings.max_body_bytes, self.settings.share_of(most))
        if self.n_bytes[owner] > most_own or self.n_bytes.total() > most:
            raise ApiError(503, "the server is reading too many bodies", code="overloaded", retry_after=1)

    def release(self, owner: str | None, n_bytes: int) -> None:
        self.n_bytes[owner] -= n_bytes
        if n_bytes > _LARGE and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, return_free_memory)


class _Body:
    """Receives the body of a request, as the application asks for it."""

    def __init__(self, receive: Receive, headers: Headers, bodies: _Bodies, owner: str | None) -> None:
        self._receive, self._bodies, self._owner = receive, bodies, owner
        self._end = time.monotonic() + bodies.settings.body_seconds
        self.exists = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self.is_read = not self.exists
        self.n_bytes = 0

    async def receive(self) -> Message:
        if self.is_read:  # what can still come is that the client hangs up
            return await self._receive()
        settings = self._bodies.settings
        try:
            message = await asyncio.wait_for(self._receive(), self._end - time.monotonic())
        except asyncio.TimeoutError:
            expected = f"the body did not arrive within {settings.body_seconds:g} seconds"
            raise ApiError(408, expected, code="body_timeout") from None
        n_bytes = len(message.get("body", b""))
        self.n_bytes += n_bytes
        self._bodies.n_bytes[self._owner] += n_bytes
        if self.n_bytes > settings.max_body_bytes:
            raise too_large(settings)
        self._bodies.require_room(self._owner)
        if not message.get("more_body", False):
            self.is_read = True
            if self.n_bytes > _LARGE:  # parsing takes long, and others have a turn before it
                async with self._bodies.turn:
                    await asyncio.sleep(_PAUSE_SECONDS)
        return message


def too_large(settings: ServeSettings) -> ApiError:
    return ApiError(413, f"the body is too large; expected at most {settings.max_body_bytes} bytes", code="too_large")


class Guard:
    """Middleware that refuses what must not reach the application, and notes every request.

    Without API keys only requests to a name of this machine pass: a page of another site could reach the server through
    a name that resolves to 127.0.0.1. Bodies must be declared as JSON: other types browsers send without asking first.
    With keys, only the page and /health are open; `scope["owner"]` stands for the key.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, note: Callable[[str, int, float], None]) -> None:
        self._app, self._settings, self._note = app, settings, note
        self._hosts = None if settings.api_keys else frozenset({*LOCAL_HOSTS, settings.host})
        self._digests = [_digest(key) for key in settings.api_keys]
        self._open_paths = frozenset({"/health", *page_paths()})
        self._bodies = _Bodies(settings)
        most = most_connections(settings)
        self._n_requests: Counter[str | None] = Counter()  # by owner
        self._most_requests = most - max(1, most // 8)  # the others keep a place for /health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        owner = scope["owner"] = self._owner(headers)
        body = _Body(receive, headers, self._bodies, owner)
        self._n_requests[owner] += 1

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not body.is_read:  # nor will it be
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            refusal = self._refusal(scope, headers, body)
            await (self._app if refusal is None else refusal.response())(scope, body.receive, noted_send)
        except Exception:
            _LOG.exception("a request failed", extra={"path": scope["path"]})
            if not status:
                body.is_read = False  # close the connection
                failure = ApiError(500, "the server failed on this request; its log says why")
                await failure.response()(scope, receive, noted_send)
        finally:
            self._n_requests[owner] -= 1
            self._bodies.release(owner, body.n_bytes)
            route = getattr(scope.get("route"), "path", "other")
            self._note(route, status, time.perf_counter() - start)

    def _refusal(self, scope: Scope, headers: Headers, body: _Body) -> ApiError | None:
        host = headers.get("host", "")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            message = f"host is {host[:100]!r}; expected a name of this machine, or a server with an API key"
            return ApiError(403, message, code="unknown_host")
        n_requests, most = self._n_requests, self._most_requests
        is_full = n_requests.total() > most or n_requests[scope["owner"]] > self._settings.share_of(most)
        if is_full and scope["path"] != "/health":
            return ApiError(503, "the server answers too many requests", code="overloaded", retry_after=1)
        if scope["owner"] is None and scope["path"] not in self._open_paths:
            message = "the API key is missing or wrong; expected Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            return too_large(self._settings)
        if scope["method"] == "POST" and body.exists:
            kind = headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                message = f"content-type is {kind[:100]!r}; expected application/json"
                return ApiError(415, message, code="unsupported_media_type")
        return None

    def _owner(self, headers: Headers) -> str | None:
        """Return what stands for the key of a request, or None if it has none that is known."""
        if not self._digests:
            return ""
        azure = f"Bearer {headers.get('api-key', '')}"  # the header of OpenAI's client for Azure
        scheme, _, given = headers.get("authorization", azure).partition(" ")
        digest = _digest(given.strip())
        # every key is compared, each in constant time, so that time says nothing about them
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return digest if scheme.lower() == "bearer" and any(matches) else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _host_name(host: str) -> str | None:
    """Return the name in a Host header, or None if it is not a name with or without a port."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host, re.ASCII)
    return (found[1] or found[2] or "").lower() if found else None
