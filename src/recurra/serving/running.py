"""A server from runs to a listening socket."""

import math
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from recurra.checks import sentence
from recurra.runs import open_run
from recurra.serving.app import create_app
from recurra.serving.console import console_line
from recurra.serving.logs import set_up_log
from recurra.serving.served_model import ServedModel
from recurra.serving.service import Service
from recurra.serving.settings import ServeSettings
from recurra.training.allocator import keep_large_blocks

_SWITCH_SECONDS = 2e-4
"""After how long a thread that waits for the interpreter gets it. The engine waits after every operation of torch: with
Python's 5 ms, each step would wait several times for the thread that writes answers."""


def serve_runs(paths: Sequence[str], settings: ServeSettings, arguments: Namespace, overrides: Sequence[str]) -> int:
    """Serve runs until a signal comes."""
    keep_large_blocks()
    weights = None if arguments.weights == "model" else arguments.weights
    models = [load_model(path, weights, arguments.checkpoint, overrides) for path in paths]
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise ValueError(sentence("runs", ", ".join(names), "folders with distinct names"))
    run_service(Service(models, settings, arguments.threads), log_file=arguments.log_file)
    return 0


def run_service(service: Service, *, log_file: Path | None = None) -> None:
    """Warm up, and serve until a signal comes: SIGINT or SIGTERM.

    Args:
        service: what to serve.
        log_file: where the log goes, a JSON object in each line; None for the standard error, from warnings on.

    Raises:
        OSError: the address is taken, or the log cannot be written.
    """
    settings = service.settings
    sys.setswitchinterval(_SWITCH_SECONDS)
    set_up_log(log_file)
    for model in service.models.values():
        model.warm_up()
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds),
    )
    listening = listening_socket(settings)
    host, port = listening.getsockname()[:2]
    place = f"http://{host if ':' not in host else f'[{host}]'}:{port}"
    print(f"serving {', '.join(service.models)} at {place}", file=sys.stderr, flush=True)
    with console_line(service):
        uvicorn.Server(config).run([listening])


def listening_socket(settings: ServeSettings) -> socket.socket:
    """Bind the address before anything else starts. Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"{error.strerror}: {settings.host}:{settings.port}") from error
    return made


def load_model(path: str, weights: str | None, checkpoint: str, overrides: Sequence[str]) -> ServedModel:
    """Load a run as a model to serve; it is called as its folder."""
    trained = open_run(path, checkpoint=checkpoint, overrides=overrides)
    tokenizer = trained.tokenizer if trained.task.has_tokenizer() else None
    template = Path(path) / "chat_template.jinja"
    return ServedModel(
        trained.name,
        trained.model,
        tokenizer,
        weights=weights,
        task=trained.task.explored(trained),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )
