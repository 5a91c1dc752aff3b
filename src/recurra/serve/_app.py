"""The server as an ASGI application, and as a process: models from runs, a socket, a log."""

import asyncio
import errno
import gc
import json
import logging
import math
import socket
import sqlite3
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from recurra import __version__
from recurra._process import keep_large_blocks
from recurra.checks import sentence
from recurra.serve import _openai as openai
from recurra.serve import _routes as routes
from recurra.serve._bodies import refusal_of
from recurra.serve._database import DiskFull
from recurra.serve._guard import Connection, Guard
from recurra.serve._http import DISK_FULL, ApiError, ServeSettings, page, page_paths
from recurra.serve._model import ServedModel
from recurra.serve._scheduler import QueueFull
from recurra.serve._service import Caller, Service, caller
from recurra.train.run import open_run

_LOG = logging.getLogger("recurra.serve")

_SWITCH_SECONDS = 2e-4
"""How soon a waiting thread gets the interpreter. The engine waits after every operation of torch; with Python's 5 ms
each step would wait several times for the thread that writes answers."""
_COLLECT_EVERY = 20_000
"""New objects between two collections of garbage. With Python's 700, a large body is walked many times while parsed."""
_RECEIVE_BYTES = 2**16
"""What a connection may receive before it is read: little, so that a round over many connections is short."""


def create_app(service: Service) -> FastAPI:
    """Make the application of a service, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.stop()

    app = FastAPI(title="Recurra", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Guard, settings=service.settings, note=service.note_request)
    app.include_router(openai.router)
    app.include_router(routes.router)
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"], response_class=PlainTextResponse)
    for path in page_paths():
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False)
    for kind in (ApiError, QueueFull, DiskFull, sqlite3.Error, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _error_response)
    return app


async def _health(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    return {"status": "ok", "models": list(service.models)}


async def _metrics(by: Annotated[Caller, Depends(caller)]) -> Response:
    return Response(by.service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, QueueFull):
        error = ApiError(429, str(error), code="queue_full", retry_after=1)
    elif isinstance(error, (DiskFull, sqlite3.Error)):
        _LOG.error("the sessions file failed: %s", error, extra={"path": request.url.path})
        error = _store_failed(error)
    elif isinstance(error, RequestValidationError):
        where, message = refusal_of(error.errors()[0], error.body)
        error = ApiError(400, message, param=where, code="invalid_value")
    elif not isinstance(error, ApiError) and isinstance(error, HTTPException) and error.status_code == 404:
        error = ApiError(404, f"there is no {request.method} {request.url.path[:200]}", code="unknown_url")
    elif not isinstance(error, ApiError) and isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    assert isinstance(error, ApiError)
    return error.response()


def _store_failed(error: Exception) -> ApiError:
    if isinstance(error, DiskFull):
        return ApiError(507, str(error), code=DISK_FULL)
    message = f"the sessions file cannot be used now: {error}"
    return ApiError(503, message, code="sessions_file_failed", retry_after=1)


def serve_runs(
    paths: Sequence[str],
    settings: ServeSettings,
    arguments: Namespace,
    overrides: Sequence[str],
    ready: Callable[[], object] = lambda: None,
) -> int:
    """Serve trained runs until a signal arrives; call `ready` once clients can connect."""
    keep_large_blocks()
    weights = None if arguments.weights == "model" else arguments.weights
    dtypes = {"kv_cache_dtype": arguments.kv_cache_dtype, "state_dtype": arguments.state_dtype}

    def load() -> list[ServedModel]:
        models = [_load_model(path, weights, arguments.checkpoint, overrides, dtypes) for path in paths]
        names = [model.name for model in models]
        if len(set(names)) < len(names):
            raise ValueError(sentence("runs", ", ".join(names), "folders with distinct names"))
        return models

    run_service(load, settings, _threads_of_model(arguments.threads), log_file=arguments.log_file, ready=ready)
    return 0


def _threads_of_model(threads: int | None) -> int:
    """Return how many threads run the model: unless given, all but one, which HTTP takes. They wait for one another."""
    return max(1, torch.get_num_threads() - 1) if threads is None else threads


def _load_model(
    path: str,
    weights: str | None,
    checkpoint: str,
    overrides: Sequence[str],
    dtypes_of_states: dict[str, str] | None = None,
) -> ServedModel:
    trained = open_run(path, checkpoint=checkpoint, overrides=overrides)
    print(f"loading {trained.name}", file=sys.stderr, flush=True)  # a large model takes a minute
    return ServedModel(
        trained.name,
        trained.model,
        trained.tokenizer if trained.task.has_tokenizer() else None,
        weights=weights,
        in_place=True,
        dtypes_of_states=dtypes_of_states,
        task=trained.task.explored(trained),
        chat_template=trained.folder.read_chat_template(),
    )


def run_service(
    load: Callable[[], list[ServedModel]],
    settings: ServeSettings,
    threads: int | None = None,
    *,
    log_file: Path | None = None,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Load models, warm them up, and serve them until SIGINT or SIGTERM; call `ready` once clients can connect."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    _set_up_log(log_file)
    listening_socket(settings).close()  # a port that is taken is found out before models are loaded
    service = Service(_loaded(load), settings, threads)
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 10, 100)
    listening = listening_socket(settings)
    host, port = listening.getsockname()[:2]
    address = f"http://{host if ':' not in host else f'[{host}]'}:{port}"
    print(f"serving {', '.join(service.models)} at {address}", file=sys.stderr, flush=True)
    ready()
    uvicorn.Server(uvicorn_config(service)).run([listening])


def _loaded(load: Callable[[], list[ServedModel]]) -> list[ServedModel]:
    """Load in a thread that ends, so that the engine's thread is the only one with a pool of OpenMP's threads.

    Every thread that has computed in parallel keeps a pool, and libgomp's threads sleep almost at once when there are
    more of them than cores, which slows every step (docs/guides/streams.md).
    """
    loaded: Future[list[ServedModel]] = Future()

    def run() -> None:
        try:
            models = load()
            for model in models:
                model.warm_up()
            loaded.set_result(models)
        except BaseException as error:  # raised where the result is asked for
            loaded.set_exception(error)

    loading = threading.Thread(target=run, name="recurra-loading", daemon=True)  # an interrupt does not wait for it
    loading.start()
    models = loaded.result()
    loading.join()
    return models


def uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http=cast("type[asyncio.Protocol]", partial(Connection, service.settings, {})),
        ws="none",
        backlog=service.settings.max_connections,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(service.settings.grace_seconds),
    )


def listening_socket(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        got = f"{settings.port}, which another program listens on"
        raise OSError(sentence("--port", got, "a free port")) from error
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    return listening


_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class _JsonLines(logging.Formatter):
    """Formats a record as a line of JSON: time, level, message, extra fields, and an error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _set_up_log(path: Path | None) -> None:
    handler = logging.StreamHandler() if path is None else logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_JsonLines())
    for name in ("recurra.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if path is None or name == "uvicorn" else logging.INFO)
