"""What every part of the server shares: its settings, errors in OpenAI's form, and the files of the page."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from recurra.checks import require, require_at_least, require_positive, sentence
from recurra.convert.export._page_files import PAGE, page_file

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The address of a server, its keys and its limits."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 chooses a free one
    api_keys: tuple[str, ...] = ()  # requests must bring one of them, if there are any
    sessions_file: Path | None = None  # None keeps sessions in memory, and they end with the server
    max_streams: int = 1024  # streams that are read or written at the same time
    max_queue: int = 1024  # requests that wait; more are refused with 429
    max_sessions: int = 100_000  # sessions of one key
    max_resident_sessions: int = 1024  # sessions in memory; the least recently used ones are on disk only
    max_tokens: int = 65_536  # tokens that a request may bring or ask for, and that a session's transcript keeps
    max_body_bytes: int = 4 * 2**20
    bodies_bytes: int = 64 * 2**20  # bodies of all requests together; more are refused with 503
    max_connections: int = 4096  # at most 64 fewer than the process may open files
    header_seconds: float = 10.0  # how long a client may take to send the headers of a request
    body_seconds: float = 60.0  # and its body, or read nothing of a response
    checkpoint_bytes: int = 128 * 2**20  # memory for states along the transcripts, for fast forks and rewinds
    prefix_cache_bytes: int = 256 * 2**20  # states after prompts, in memory and as many on disk; 0 keeps none
    grace_seconds: float = 10.0  # how long requests may continue after a signal to stop
    request_seconds: float = 600.0  # how long a request may take, queueing included

    def __post_init__(self) -> None:
        names = ("max_streams", "max_sessions", "max_resident_sessions", "max_tokens", "max_body_bytes")
        require_at_least(1, **{name: getattr(self, name) for name in names})
        require_at_least(2, max_connections=self.max_connections)
        require_at_least(self.max_body_bytes, bodies_bytes=self.bodies_bytes)
        sizes = {"checkpoint_bytes": self.checkpoint_bytes, "prefix_cache_bytes": self.prefix_cache_bytes}
        require_at_least(0, max_queue=self.max_queue, **sizes)
        seconds = {"header_seconds": self.header_seconds, "body_seconds": self.body_seconds}
        require_positive(request_seconds=self.request_seconds, **seconds)
        require(0 <= self.port < 2**16, "port", self.port, "a number from 0 to 65,535")
        if not all(len(key) >= 8 and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ValueError(sentence("an API key", "too short or not ASCII", "at least 8 printable ASCII characters"))
        if self.host not in LOCAL_HOSTS and not self.api_keys:
            got = f"{self.host}, which other machines may reach, without an API key"
            raise ValueError(sentence("host", got, "127.0.0.1, or a key", "set RECURRA_API_KEY or --api-key-file"))

    def share_of(self, most: int) -> int:
        """Return what one key may have of a limit. One in eight is for the others, if there are several keys."""
        return most if len(self.api_keys) < 2 else min(most, max(1, most * 7 // 8))


_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error that is the answer to a request, in OpenAI's form. It never contains a traceback.

    While FastAPI reads a body, it passes on errors of its base class alone.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        return JSONResponse(self.body(), self.status, headers)


def refusal(
    param: str, got: object, expected: str, hint: str = "", *, status: int = 400, code: str | None = None
) -> ApiError:
    """The error of a request whose field `param` is invalid."""
    return ApiError(status, sentence(param, got, expected, hint), code=code, param=param)


DISK_FULL = "disk_full"


def request_failed(message: str = "the model failed on this request", code: str = "turn_failed") -> ApiError:
    """The error of a request that ended with reason "error"."""
    return ApiError(507 if code == DISK_FULL else 500, message, code=code)


_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
"""Not from Python's mimetypes, which asks Windows' registry: browsers refuse a script that is text/plain there."""
_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


@cache
def _page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by path, each with its media type: read once, so no request's path reaches the disk."""
    files = {name: page_file(name) for name in PAGE} | {"engine.json": json.dumps({"engine": "server"}).encode()}
    return {name: (content, _MEDIA_TYPES[PurePosixPath(name).suffix]) for name, content in files.items()}


def page_paths() -> list[str]:
    """Return the paths of the page and its files."""
    return ["/", *(f"/{name}" for name in (*PAGE, "engine.json"))]


async def page(request: Request) -> Response:
    """Answer with a file of the explorer's page."""
    content, media_type = _page_files()[request.url.path[1:] or "index.html"]
    return Response(content, media_type=media_type, headers=_HEADERS)
