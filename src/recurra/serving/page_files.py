"""The explorer's page: files inside the package, read once, so that no path from a request reaches the disk."""

import json
from functools import cache
from pathlib import PurePosixPath

from fastapi.responses import PlainTextResponse, Response

from recurra.web import PAGE, page_file

INDEX = "index.html"
_TYPES = {
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
    return {name: (content, _TYPES[PurePosixPath(name).suffix]) for name, content in files.items()}


def page_response(path: str) -> Response:
    """Answer a request for a file of the page; "" is the page itself."""
    found = page_files().get(path or INDEX)
    if found is None:
        return PlainTextResponse("There is nothing here.\n", 404)
    return Response(found[0], media_type=found[1], headers=_HEADERS)
