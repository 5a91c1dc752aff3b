"""What Prometheus is told."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recurra.serving.engine import Engine
from recurra.serving.sessions import Sessions

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """Numbers of a server, read when they are asked for.

    Args:
        engine: what runs.
        sessions: what is kept.
    """

    def __init__(self, engine: Engine, sessions: Sessions) -> None:
        self._engine, self._sessions = engine, sessions
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter("recurra_requests", "Requests answered.", ["route", "status"], registry=self._registry)
        self._seconds = Histogram(
            "recurra_request_seconds",
            "Seconds to the end of an answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "recurra_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._steps = Histogram(
            "recurra_step_seconds", "Of a step of a batch.", buckets=_SECONDS, registry=self._registry
        )

    def note_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Give what is counted elsewhere."""
        counters, scheduler = self._engine.counters, self._engine.scheduler
        yield CounterMetricFamily("recurra_tokens_read", "Tokens read.", value=counters.read)
        yield CounterMetricFamily("recurra_tokens_written", "Tokens written.", value=counters.written)
        yield CounterMetricFamily("recurra_texts", "Texts that ended, several of one turn.", value=counters.ended)
        yield CounterMetricFamily("recurra_texts_failed", "Texts that ended with an error.", value=counters.failed)
        yield GaugeMetricFamily("recurra_streams", "Streams that are read or written.", value=scheduler.n_streams)
        yield GaugeMetricFamily("recurra_queue", "Turns that wait.", value=scheduler.n_waiting)
        yield GaugeMetricFamily("recurra_sessions_resident", "Sessions in memory.", value=self._sessions.n_resident)

    def text(self) -> bytes:
        """Give everything in Prometheus's text format."""
        for durations, histogram in (
            (self._engine.counters.first_token, self._first),
            (self._engine.counters.step_seconds, self._steps),
        ):
            while durations:
                histogram.observe(durations.popleft())
        return generate_latest(self._registry)
