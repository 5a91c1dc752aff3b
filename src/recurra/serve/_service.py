"""What the endpoints share: the service, which is models, engine, sessions and metrics, and its callers."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import fastapi
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recurra.serve._http import ServeSettings, refusal
from recurra.serve._model import ServedModel
from recurra.serve._prefixes import PrefixCache, prefix_model
from recurra.serve._sessions import Sessions
from recurra.serve._store import SessionStore, read_prefixes, write_prefix
from recurra.serve._streaming import AsyncEngine

_LOG = logging.getLogger("recurra.serve")


class Service:
    """A server's models and what runs them."""

    def __init__(self, models: list[ServedModel], settings: ServeSettings, threads: int | None = None) -> None:
        self.settings, self.models = settings, {model.name: model for model in models}
        self.started = time.time()
        self.store = SessionStore(settings.sessions_file)
        self.prefixes = self._prefix_cache() if settings.prefix_cache_bytes else None
        limits = {"max_streams": settings.max_streams, "max_queue": settings.max_queue, "share_of": settings.share_of}
        self.engine = AsyncEngine(**limits, threads=threads, prefixes=self.prefixes)
        self.sessions = Sessions(self.models, self.engine, self.store, settings)
        self.metrics = _Metrics(self.engine, self.sessions, self.store, self.prefixes)

    def _prefix_cache(self) -> PrefixCache:
        """Make a cache with the states that the sessions file has; without one, it ends with the server."""
        most = self.settings.prefix_cache_bytes
        if self.settings.sessions_file is None:
            return PrefixCache(most)
        cache = PrefixCache(most, partial(self.store.submit_later, write_prefix, most))
        models = {prefix_model(model): model.plain for model in self.models.values()}
        try:
            for saved in self.store.submit(read_prefixes, models).result():
                cache.add(*saved)
        except sqlite3.Error:  # the server can do without
            _LOG.exception("the saved prefixes cannot be read")
        return cache

    def note_request(self, route: str, status: int, seconds: float) -> None:
        self.metrics.note_request(route, status, seconds)
        _LOG.info("request", extra={"route": route, "status": status, "seconds": round(seconds, 4)})

    def model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = f"one of {', '.join(self.models)}"
            raise refusal("model", repr(name[:200]), known, status=404, code="model_not_found")
        return self.models[name]

    def require_allowed(self, **n_tokens: int) -> None:
        """Raise ApiError if a number of tokens exceeds the server's limit, by the name of its field."""
        for name, n in n_tokens.items():
            if n > self.settings.max_tokens:
                raise refusal(name, n, f"at most {self.settings.max_tokens}", code="too_many_tokens")

    def deadline(self) -> float:
        return time.monotonic() + self.settings.request_seconds

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


async def caller(request: fastapi.Request) -> Caller:
    return Caller(request.app.state.service, request.scope["owner"])


By = Annotated[Caller, fastapi.Depends(caller)]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Metrics(Collector):
    """Numbers for Prometheus, read when they are asked for."""

    def __init__(
        self, engine: AsyncEngine, sessions: Sessions, store: SessionStore, prefixes: PrefixCache | None
    ) -> None:
        self._engine, self._sessions, self._store, self._prefixes = engine, sessions, store, prefixes
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
        yield CounterMetricFamily("recurra_disk_full", "Writes without room on the disk.", value=self._store.n_full)
        if (prefixes := self._prefixes) is not None:
            yield CounterMetricFamily(
                "recurra_prefix_lookups", "Prompts that were looked up.", value=prefixes.n_lookups
            )
            yield CounterMetricFamily("recurra_prefix_hits", "Those with a known prefix.", value=prefixes.n_hits)
            yield CounterMetricFamily("recurra_tokens_cached", "Tokens of these prefixes.", value=prefixes.n_tokens)
            rate = prefixes.n_hits / max(1, prefixes.n_lookups)
            yield GaugeMetricFamily("recurra_prefix_hit_rate", "Hits per lookup since the start.", value=rate)
            yield GaugeMetricFamily("recurra_prefix_bytes", "Memory of states after prefixes.", value=prefixes.n_bytes)

    def text(self) -> bytes:
        counters = self._engine.counters
        for durations, histogram in ((counters.first_token, self._first), (counters.step_seconds, self._steps)):
            while durations:
                histogram.observe(durations.popleft())
        return generate_latest(self._registry)
