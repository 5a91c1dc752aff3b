"""Everything that a server runs, apart from HTTP: models, engine, sessions, metrics; and who may use them."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recurra.checks import sentence
from recurra.serve._http import ApiError, ServeSettings
from recurra.serve._model import ServedModel
from recurra.serve._sessions import Sessions
from recurra.serve._store import SessionStore
from recurra.serve._streaming import AsyncEngine

_LOG = logging.getLogger("recurra.serve")


class Service:
    """A server's models and what runs them."""

    def __init__(self, models: list[ServedModel], settings: ServeSettings, threads: int | None = None) -> None:
        self.settings, self.models = settings, {model.name: model for model in models}
        self.started = time.time()
        self.engine = AsyncEngine(max_streams=settings.max_streams, max_queue=settings.max_queue, threads=threads)
        self.store = SessionStore(settings.sessions_file)
        self.sessions = Sessions(self.models, self.engine, self.store, settings)
        self.metrics = _Metrics(self.engine, self.sessions)

    def note_request(self, route: str, status: int, seconds: float) -> None:
        self.metrics.note_request(route, status, seconds)
        _LOG.info("request", extra={"route": route, "status": status, "seconds": round(seconds, 4)})

    def model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            message = f"model is {name[:200]!r}; expected one of {', '.join(self.models)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self.models[name]

    def require_allowed(self, **n_tokens: int) -> None:
        """Raise ApiError if a number of tokens exceeds the server's limit, by the name of its field."""
        for name, n in n_tokens.items():
            if n > self.settings.max_tokens:
                message = sentence(name, n, f"at most {self.settings.max_tokens}")
                raise ApiError(400, message, param=name, code="too_many_tokens")

    def deadline(self) -> float:
        return time.monotonic() + self.settings.request_seconds

    async def start(self) -> None:
        self.engine.start()

    async def stop(self) -> None:
        """End all requests, write their sessions, and close the store."""
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)  # the last events are on their way
        await self.sessions.settle()
        await asyncio.to_thread(self.store.close)


@dataclass(frozen=True)
class Caller:
    """Who sent a request. `owner` stands for the key; sessions belong to it."""

    service: Service
    owner: str


def caller(request: Request) -> Caller:
    service: Service = request.app.state.service
    keys = service.settings.api_keys
    if not keys:
        return Caller(service, "")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digest = _digest(given.strip())
    # every key is compared, each in constant time, so that time says nothing about them
    matches = [hmac.compare_digest(digest, _digest(key)) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        message = "the API key is missing or wrong; expected Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")
    return Caller(service, digest)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Metrics(Collector):
    """Numbers for Prometheus, read when they are asked for."""

    def __init__(self, engine: AsyncEngine, sessions: Sessions) -> None:
        self._engine, self._sessions = engine, sessions
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter("recurra_requests", "Requests answered.", ["route", "status"], registry=self._registry)
        self._seconds = self._histogram("recurra_request_seconds", "Seconds to the end of an answer.", "route")
        self._first = self._histogram("recurra_first_token_seconds", "From a request to its first token.")
        self._steps = self._histogram("recurra_step_seconds", "Of a step of a batch.")

    def _histogram(self, name: str, help_: str, *labels: str) -> Histogram:
        return Histogram(name, help_, labels, buckets=_SECONDS, registry=self._registry)

    def note_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        counters, scheduler = self._engine.counters, self._engine.scheduler
        yield CounterMetricFamily("recurra_tokens_read", "Tokens read.", value=counters.read)
        yield CounterMetricFamily("recurra_tokens_written", "Tokens written.", value=counters.written)
        yield CounterMetricFamily("recurra_texts", "Texts that ended, several of one request.", value=counters.ended)
        yield CounterMetricFamily("recurra_texts_failed", "Texts that ended with an error.", value=counters.failed)
        yield GaugeMetricFamily("recurra_streams", "Streams that are read or written.", value=scheduler.n_streams)
        yield GaugeMetricFamily("recurra_queue", "Requests that wait.", value=scheduler.n_waiting)
        yield GaugeMetricFamily("recurra_sessions_resident", "Sessions in memory.", value=self._sessions.n_resident)

    def text(self) -> bytes:
        counters = self._engine.counters
        for durations, histogram in ((counters.first_token, self._first), (counters.step_seconds, self._steps)):
            while durations:
                histogram.observe(durations.popleft())
        return generate_latest(self._registry)
