"""An open-loop load of streaming completions: Poisson arrivals, bounded in number, on 127.0.0.1 alone."""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Heard:
    """When a request was sent and its tokens got, on one clock; how it ended."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    status: int = 0


async def ask(port: int, path: str, body: dict[str, Any], key: str = "") -> Heard:
    """Send a request whose answer is a stream of events; note when each came."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        f"Authorization: Bearer {key}\r\n"
    )
    heard = Heard(time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
        heard.status = int((await reader.readline()).split()[1])
        held = b""
        while block := await reader.read(65536):
            now = time.perf_counter()
            text = held + block
            # a token's event has a text; the one that ends the stream has a reason instead
            n_tokens = text.count(b'"finish_reason": null') + text.count(b'"finish_reason":null')
            held = text[-20:] if not text.endswith(b"\n") else b""
            n_tokens -= held.count(b'"finish_reason": null') + held.count(b'"finish_reason":null')
            heard.tokens += [now] * n_tokens
    finally:
        writer.close()
    return heard


async def poisson(
    port: int, bodies: list[dict[str, Any]], seconds: float, path: str = "/v1/completions", seed: int = 0
) -> list[Heard]:
    """Send requests at random times, independent of the answers, so many that they take about `seconds` to arrive."""
    chance, tasks = random.Random(seed), []
    for body in bodies:
        tasks.append(asyncio.create_task(ask(port, path, body)))
        await asyncio.sleep(chance.expovariate(len(bodies) / seconds) if seconds else 0)
    return list(await asyncio.gather(*tasks))


def summary(heard: list[Heard], between: tuple[float, float] | None = None) -> dict[str, Any]:
    """Give tokens/s while all streams wrote, and the time to the first token and between two, in milliseconds.

    `between` are two times to look at instead. If the first to end did so before the last began, tokens/s are those
    between the quarter and three quarters of all tokens.
    """
    answered = [one for one in heard if one.status == 200 and len(one.tokens) > 1]
    times = sorted(at for one in answered for at in one.tokens)
    start, end = max(one.tokens[0] for one in answered), min(one.tokens[-1] for one in answered)
    if between is not None:
        start, end = between
    elif sum(start <= at <= end for at in times) < len(times) / 4:
        start, end = times[len(times) // 4], times[3 * len(times) // 4]
    gaps = [1e3 * (b - a) for one in answered for a, b in zip(one.tokens, one.tokens[1:]) if start <= b <= end]
    first = [1e3 * (one.tokens[0] - one.sent) for one in answered]
    return {
        "streams": len(heard),
        "refused": sum(one.status != 200 for one in heard),
        "tokens": len(times),
        "tokens/s": sum(start <= at <= end for at in times) / (end - start),
        "first ms": [statistics.median(first), _hundredth(first)],
        "between ms": [statistics.median(gaps), _hundredth(gaps)] if gaps else None,
    }


def _hundredth(values: list[float]) -> float:
    """The value that one in a hundred is above."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
