"""A server from runs to a listening socket."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from recurra.checks import sentence
from recurra.runs import open_run
from recurra.runs.explored import task
from recurra.serving.app import create_app
from recurra.serving.served_model import ServedModel
from recurra.serving.service import Service
from recurra.serving.settings import ServeSettings
from recurra.training import TextExperiment
from recurra.training.allocator import keep_large_blocks


def serve_runs(paths: Sequence[str], settings: ServeSettings, arguments: Namespace, overrides: Sequence[str]) -> int:
    """Serve runs until a signal comes."""
    keep_large_blocks()
    weights = None if arguments.weights == "model" else arguments.weights
    models = [load_model(path, weights, arguments.checkpoint, overrides) for path in paths]
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise ValueError(sentence("runs", ", ".join(names), "folders with distinct names"))
    service = Service(models, settings, arguments.threads)
    uvicorn.run(create_app(service), host=settings.host, port=settings.port, log_level="warning")
    return 0


def load_model(path: str, weights: str | None, checkpoint: str, overrides: Sequence[str]) -> ServedModel:
    """Load a run as a model to serve; it is called as its folder."""
    trained = open_run(path, checkpoint=checkpoint, overrides=overrides)
    tokenizer = trained.tokenizer if isinstance(trained.experiment, TextExperiment) else None
    template = Path(path) / "chat_template.jinja"
    return ServedModel(
        trained.name,
        trained.model,
        tokenizer,
        weights=weights,
        task=task(trained),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )
