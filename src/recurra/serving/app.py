"""The server as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from recurra import __version__
from recurra.serving import chats, completions, session_routes
from recurra.serving.access import Caller, caller
from recurra.serving.errors import ApiError
from recurra.serving.gate import Gate
from recurra.serving.page_files import page_response
from recurra.serving.scheduler import QueueFull
from recurra.serving.service import Service
from recurra.serving.settings import LOCAL_HOSTS


def create_app(service: Service) -> FastAPI:
    """Make the application of a service; it starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="Recurra", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    settings = service.settings
    hosts = None if settings.api_keys else frozenset({*LOCAL_HOSTS, settings.host})
    app.add_middleware(Gate, max_body_bytes=settings.max_body_bytes, hosts=hosts, note=service.note_request)
    app.include_router(chats.router)
    app.include_router(completions.router)
    app.include_router(session_routes.router)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
    app.add_api_route("/{path:path}", page, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(QueueFull, _full)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    return app


async def health(request: Request) -> dict[str, Any]:
    """Tell that the server runs."""
    service: Service = request.app.state.service
    return {"status": "ok", "models": list(service.models)}


async def metrics(asked: Annotated[Caller, Depends(caller)]) -> Response:
    """Give numbers for Prometheus."""
    return Response(asked.service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def page(path: str) -> Response:
    """Give a file of the explorer's page."""
    return page_response(path)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _full(request: Request, error: Exception) -> JSONResponse:
    return ApiError(429, str(error), code="queue_full", retry_after=1).response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or None
    return ApiError(400, f"{where or 'the body'}: {first['msg']}", param=where, code="invalid_value").response()


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), code=getattr(error, "code", None)).response()
