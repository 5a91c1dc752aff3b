"""Kill -9 of a server under load, and what is left of its sessions.

    python -m benchmarks.serve_kills --kills 50

Sessions talk to a server of a small model, each one turn after the other, and note what they were told. At a random
moment the server is killed. A new one on the same file, in this process, must have every session as its client last saw
it, with or without the turn that was in flight, whole, and must continue it as a stream does that reads the same text
anew. The moment is so many turns after the start, and a few milliseconds.
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

VOCABULARY, SESSIONS = 50, 8
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
class Talk:
    """A session as its client knows it."""

    name: str
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    in_flight: list[int] | None = None
    """Tokens of the turn that is not over, as far as they were told; None if there is none."""


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


async def talk(client: httpx.AsyncClient, session: Talk, chance: random.Random) -> None:
    """One turn after the other until the server is gone."""
    try:
        while True:
            tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))]
            session.in_flight = []
            path = f"/v1/sessions/{session.name}/"
            if chance.random() < 0.5:
                answer = await client.post(path + "feed", json={"tokens": tokens})
            else:
                body = {"tokens": tokens, "max_tokens": chance.randint(1, 30), "stream": False}
                answer = await client.post(path + "generate", json=body)
            answer.raise_for_status()
            session.tokens += [token["id"] for token in answer.json()["tokens"]]
            session.turns, session.in_flight = session.turns + 1, None
    except httpx.TransportError:
        return


async def one_kill(folder: Path, talks: list[Talk], chance: random.Random) -> dict[str, int]:
    """Start, talk, kill, start again, compare."""
    server = Killed(folder)
    async with await server.client() as client:
        for session in talks:
            if (await client.get(f"/v1/sessions/{session.name}")).status_code == 404:
                assert not session.tokens, f"{session.name} is lost"
                (await client.post("/v1/sessions", json={"name": session.name})).raise_for_status()
        tasks = [asyncio.create_task(talk(client, session, chance)) for session in talks]
        until = sum(session.turns for session in talks) + chance.randint(1, 40)
        while sum(session.turns for session in talks) < until and not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
        await asyncio.sleep(chance.uniform(0, 0.05))
        server.kill()
        await asyncio.gather(*tasks)
    return await compared(folder, talks)


async def compared(folder: Path, talks: list[Talk]) -> dict[str, int]:
    """Open the file again, here, and compare its sessions with what their clients know."""
    found = {"as last seen": 0, "with the turn in flight": 0}
    service, model = service_of(folder / "sessions.sqlite"), small_model()
    service.engine.start()
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for session in talks:
            answer = await client.get(f"/v1/sessions/{session.name}/transcript")
            answer.raise_for_status()
            tokens = [token["id"] for token in answer.json()["tokens"]]
            same = tokens == session.tokens
            one_more = session.in_flight is not None and tokens[: len(session.tokens)] == session.tokens
            assert same or one_more, f"{session.name} has {len(tokens)} tokens, and its client {len(session.tokens)}"
            found["as last seen" if same else "with the turn in flight"] += 1
            if tokens:
                body: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "stream": False}
                answer = await client.post(f"/v1/sessions/{session.name}/generate", json=body)
                written = [token["id"] for token in answer.json()["tokens"]]
                stream = Stream(model)
                stream.feed(tokens)
                right = list(stream.generate(3, sampling=SamplingConfig(temperature=0.0)))
                assert written == right, f"{session.name} continues as another text"
                tokens += written
            session.tokens, session.in_flight = tokens, None
    await service.stop()
    return found


def run(folder: Path, kills: int, seed: int = 0, tells: bool = False) -> dict[str, int]:
    """Kill a server so many times; give what was found. Raises AssertionError if a session is not as it must be."""
    chance, total = random.Random(seed), {"kills": 0, "turns": 0}
    talks = [Talk(f"s{number}") for number in range(SESSIONS)]
    for _ in range(kills):
        for name, count in asyncio.run(one_kill(folder, talks, chance)).items():
            total[name] = total.get(name, 0) + count
        total["kills"] += 1
        total["turns"] = sum(session.turns for session in talks)
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
