"""Everything that a server runs, apart from HTTP: models, engine, sessions."""

import asyncio
import logging
import time

from recurra.serving.engine import Engine
from recurra.serving.errors import ApiError
from recurra.serving.live import LiveTurns
from recurra.serving.metrics import Metrics
from recurra.serving.served_model import ServedModel
from recurra.serving.sessions import Sessions
from recurra.serving.settings import ServeSettings
from recurra.serving.store import SessionStore

LOG = logging.getLogger("recurra.serving")


class Service:
    """A server's models and what runs them.

    Args:
        models: at least one, with distinct names; the first is the default.
        settings: the limits.
        threads: for torch and the kernels; None leaves it to torch.

    Raises:
        OSError, ValueError: the sessions file cannot be opened.
    """

    def __init__(self, models: list[ServedModel], settings: ServeSettings, threads: int | None = None) -> None:
        self.settings, self.models = settings, {model.name: model for model in models}
        self.started = time.time()
        self.live = LiveTurns()
        self.engine = Engine(self.live.deliver, settings.max_streams, settings.max_queue, threads)
        self.store = SessionStore(settings.sessions_file)
        self.sessions = Sessions(self.models, self.engine, self.live, self.store, settings)

        self.metrics = Metrics(self.engine, self.sessions)

    def note_request(self, route: str, status: int, seconds: float) -> None:
        """Count and log a request."""
        self.metrics.note_request(route, status, seconds)
        LOG.info("request", extra={"route": route, "status": status, "seconds": round(seconds, 4)})

    def model(self, name: str | None) -> ServedModel:
        """Find a model by its name; None is the first. Raises ApiError if there is none of that name."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            message = f"model is {name[:200]!r}; expected one of {', '.join(self.models)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self.models[name]

    def deadline(self) -> float:
        """When a turn that begins now is late."""
        return time.monotonic() + self.settings.turn_seconds

    async def start(self) -> None:
        """Start the engine; its events go to the running loop."""
        self.live.attach(asyncio.get_running_loop())
        self.engine.start()

    async def stop(self) -> None:
        """End all turns, write their sessions, and close the store."""
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)  # the last events are on their way
        await self.sessions.settle()
        await asyncio.to_thread(self.store.close)
