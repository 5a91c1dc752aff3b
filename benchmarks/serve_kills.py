"""Kill -9 of a server under load, and what is left of its sessions.

    python -m benchmarks.serve_kills --kills 50

Clients talk to a server of a small model, each one request after the other: they open, feed, continue, fork, rewind and
close sessions, and note what they were told. At a random moment the server is killed. A new one on the same file, in
this process, must have every session as its client last saw it, with or without the request that was in flight, whole,
and no others, and must continue it as a stream does that reads the same text anew. The moment is so many requests after
the start, and a few milliseconds.
"""

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._app import create_app, listening_socket, uvicorn_config
from recurra.serve._http import ServeSettings
from recurra.serve._model import ServedModel
from recurra.serve._service import Service
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

VOCABULARY, CLIENTS, MOST_SESSIONS = 50, 8, 4
PROCESSES = multiprocessing.get_context("forkserver")


def small_model() -> LanguageModel:
    """In float64, where pieces of other sizes give the same tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, 32, 48)).double().eval()


def service_of(sessions_file: Path) -> Service:
    settings = ServeSettings(port=0, sessions_file=sessions_file)
    return Service([ServedModel("small", small_model())], settings, threads=1)


def serve(sessions_file: str, port_file: str) -> None:
    """Serve the small model; runs in a process of its own."""
    service = service_of(Path(sessions_file))
    listening = listening_socket(service.settings)
    Path(port_file).write_text(str(listening.getsockname()[1]))
    uvicorn.Server(uvicorn_config(service)).run([listening])


@dataclass
class Change:
    """What a request makes of a session: these tokens and a number of others, or nothing."""

    name: str
    tokens: list[int] | None
    n_more: int = 0

    def fits(self, tokens: list[int] | None) -> bool:
        if self.tokens is None or tokens is None:
            return self.tokens is tokens
        n = len(self.tokens)
        return tokens[:n] == self.tokens and len(tokens) == n + self.n_more


@dataclass
class Talk:
    """A client, and the tokens of its sessions as it knows them."""

    name: str
    sessions: dict[str, list[int]] = field(default_factory=dict)
    requests: int = 0
    in_flight: Change | None = None

    def next_request(self, chance: random.Random) -> tuple[str, str, dict[str, Any] | None, Change]:
        """Return a request's method, path and body, and what it changes."""
        new, may_open = f"{self.name}.{self.requests}", len(self.sessions) < MOST_SESSIONS
        kind = chance.choice(["feed", "generate", "rewind", "close", *(["open", "fork"] * may_open)])
        if kind == "open" or not self.sessions:
            return "POST", "", {"name": new}, Change(new, [])
        name = chance.choice(list(self.sessions))
        before, path = self.sessions[name], f"/{name}/{kind}"
        position = chance.randint(0, len(before))
        tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))]
        n = chance.randint(1, 30)
        if kind == "close":
            return "DELETE", f"/{name}", None, Change(name, None)
        if kind == "rewind":
            return "POST", path, {"position": position}, Change(name, before[:position])
        if kind == "fork":
            return "POST", path, {"position": position, "name": new}, Change(new, before[:position])
        if kind == "feed":
            return "POST", path, {"tokens": tokens}, Change(name, before + tokens)
        body = {"tokens": tokens, "max_tokens": n, "stream": False}
        return "POST", path, body, Change(name, before + tokens, n)


class Killed:
    """A server in a process, started and killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)
        arguments = str(folder / "sessions.sqlite"), str(self._port_file)
        self.process = PROCESSES.Process(target=serve, args=arguments)
        self.process.start()

    async def client(self) -> httpx.AsyncClient:
        while not self._port_file.exists() or not self._port_file.read_text():
            assert self.process.is_alive(), "the server ended"
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{self._port_file.read_text()}"
        async with httpx.AsyncClient(base_url=url) as asking:
            while True:
                try:
                    await asking.get("/health")
                    return httpx.AsyncClient(base_url=url, timeout=60)
                except httpx.TransportError:
                    await asyncio.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


async def talk(client: httpx.AsyncClient, one: Talk, chance: random.Random) -> None:
    """One request after the other until the server is gone."""
    try:
        while True:
            method, path, body, change = one.next_request(chance)
            one.in_flight = change
            answer = (await client.request(method, f"/v1/sessions{path}", json=body)).raise_for_status().json()
            if change.tokens is None:
                del one.sessions[change.name]
            else:
                told = answer.get("tokens", ())
                one.sessions[change.name] = change.tokens + [item["id"] for item in told if item["from"] == "written"]
            one.requests, one.in_flight = one.requests + 1, None
    except httpx.TransportError:
        return


async def one_kill(folder: Path, talks: list[Talk], chance: random.Random) -> dict[str, int]:
    """Start, talk, kill, start again, compare."""
    server = Killed(folder)
    async with await server.client() as client:
        tasks = [asyncio.create_task(talk(client, one, chance)) for one in talks]
        until = sum(one.requests for one in talks) + chance.randint(1, 60)
        while sum(one.requests for one in talks) < until and not any(task.done() for task in tasks):
            await asyncio.sleep(0.001)
        await asyncio.sleep(chance.uniform(0, 0.05))
        server.kill()
        await asyncio.gather(*tasks)
    return await compared(folder, talks)


async def compared(folder: Path, talks: list[Talk]) -> dict[str, int]:
    """Open the file again, here, and compare its sessions with what their clients know."""
    found = {"sessions": 0, "requests in flight": 0, "of these done": 0}
    service, model = service_of(folder / "sessions.sqlite"), small_model()
    service.engine.start()
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for one in talks:
            if (change := one.in_flight) is not None:
                found["requests in flight"] += 1
                tokens = await kept_tokens(client, change.name)
                if tokens != one.sessions.get(change.name):
                    assert change.fits(tokens), f"{change.name} is half changed"
                    found["of these done"] += 1
                    one.sessions.pop(change.name, None)
                    one.sessions |= {} if tokens is None else {change.name: tokens}
            for name, tokens in one.sessions.items():
                assert await kept_tokens(client, name) == tokens, f"{name} is not as its client saw it"
                if tokens:
                    tokens += await continued(client, name, tokens, model)
            one.in_flight, one.requests = None, one.requests + 1  # so that names are new
        infos = (await client.get("/v1/sessions", params={"limit": 1000})).raise_for_status().json()["data"]
    await service.stop()
    known = sorted(name for one in talks for name in one.sessions)
    assert sorted(info["id"] for info in infos) == known, "there are other sessions"
    return found | {"sessions": len(known)}


async def kept_tokens(client: httpx.AsyncClient, name: str) -> list[int] | None:
    answer = await client.get(f"/v1/sessions/{name}/transcript")
    return None if answer.status_code == 404 else [token["id"] for token in answer.raise_for_status().json()["tokens"]]


async def continued(client: httpx.AsyncClient, name: str, tokens: list[int], model: LanguageModel) -> list[int]:
    """Let a session write three tokens, which must be those of a stream that reads its text anew."""
    body = {"max_tokens": 3, "temperature": 0, "stream": False}
    answer = (await client.post(f"/v1/sessions/{name}/generate", json=body)).raise_for_status()
    written = [token["id"] for token in answer.json()["tokens"]]
    stream = Stream(model)
    stream.feed(tokens)
    right = list(stream.generate(3, sampling=SamplingConfig(temperature=0.0)))
    assert written == right, f"{name} continues as another text"
    return written


def run(folder: Path, kills: int, seed: int = 0, tells: bool = False) -> dict[str, int]:
    """Kill a server so many times; give what was found. Raises AssertionError if a session is not as it must be."""
    chance, total = random.Random(seed), {"kills": 0, "requests": 0}
    talks = [Talk(f"s{number}") for number in range(CLIENTS)]
    for _ in range(kills):
        for name, count in asyncio.run(one_kill(folder, talks, chance)).items():
            total[name] = total.get(name, 0) + count
        total["kills"] += 1
        total["requests"] = sum(one.requests for one in talks) - CLIENTS * total["kills"]
        if tells:
            print(total, flush=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="(default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    arguments = parser.parse_args()
    PROCESSES.set_forkserver_preload(["recurra.serve._app"])
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), arguments.kills, arguments.seed, tells=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
