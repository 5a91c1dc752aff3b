"""The gate in front of the application: the size and type of bodies, the names of the server, unforeseen errors."""

import json
import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recurra.serving.errors import ApiError, error_body

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
