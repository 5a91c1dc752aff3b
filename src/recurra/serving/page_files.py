"""The explorer's page: files inside the package, read once, so that no path from a request reaches the disk."""

import mimetypes
from functools import cache
from pathlib import Path

from fastapi.responses import PlainTextResponse, Response

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
_MISSING = "The explorer's page is not in this installation: build it with `make web`. The API is at /v1.\n"


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by their paths, each with its media type."""
    return {
        path.relative_to(FOLDER).as_posix(): (path.read_bytes(), mimetypes.guess_type(path.name)[0] or "text/plain")
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file()
    }


def page_response(path: str) -> Response:
    """Answer a request for a file of the page; "" is the page itself."""
    found = page_files().get(path or INDEX)
    if found is None:
        return PlainTextResponse(_MISSING if not path else "There is nothing here.\n", 404)
    return Response(found[0], media_type=found[1], headers=_HEADERS)
