"""A server under a steady load for an hour: memory, descriptors and latency at the start and at the end.

    python -m benchmarks.soak --minutes 60 --streams 64 --log soak.jsonl

Clients, each one request after the other with a pause between them, stream completions and turns of sessions. They
open, continue, fork, rewind and close these sessions all the time; the server keeps a part of them in memory. The
pauses leave most of a core free. Every minute adds a line of JSON to the log; the table at the end has the medians of
the first and the last five. The model has two layers and reads bytes; the caches are small, so that they are full
soon.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.byte_server import cpu_seconds, running, serve_bytes
from benchmarks.table import megabytes
from recurra.serve._http import ServeSettings

MOST_SESSIONS = 8
"""Sessions of one client."""


def serve(port: int, sessions_file: Path) -> None:
    caches = {"prefix_cache_bytes": 4 * 2**20, "checkpoint_bytes": 4 * 2**20, "max_resident_sessions": 128}
    settings = ServeSettings(port=port, sessions_file=sessions_file, max_tokens=2000, **caches)  # type: ignore[arg-type]
    serve_bytes(settings)


class Heard:
    """What the clients of a minute have seen."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.intervals: list[float] = []
        self.statuses: Counter[str] = Counter()

    def times(self) -> dict[str, float]:
        quantiles = {}
        for name, seconds in (("first", self.first), ("interval", self.intervals)):
            ordered = sorted(seconds) or [float("nan")]
            for percent in (50, 99):
                quantiles[f"{name} p{percent} ms"] = round(1e3 * ordered[len(ordered) * percent // 100], 2)
        return quantiles


class Client:
    """One request after the other, until it is cancelled."""

    def __init__(self, http: httpx.AsyncClient, number: int, pause: float) -> None:
        self.http, self.pause, self.chance = http, pause, random.Random(number)
        self.sessions: list[str] = []
        self.heard = Heard()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / self.pause))
            await (self.complete() if self.chance.random() < 0.5 else self.use_session())

    async def complete(self) -> None:
        await self.stream("/v1/completions", {"model": "bytes", "prompt": self.text(), "stream": True})

    async def use_session(self) -> None:
        chance = self.chance.random()
        if not self.sessions or (chance < 0.15 and len(self.sessions) < MOST_SESSIONS):
            await self.ask("POST", "", {}, opens=True)
            return
        path = f"/{self.chance.choice(self.sessions)}"
        if chance < 0.3:
            await self.ask("POST", f"{path}/rewind", {"position": 0})
        elif chance < 0.45:
            await self.ask("DELETE", path)
            self.sessions.remove(path[1:])
        elif chance < 0.6 and len(self.sessions) < MOST_SESSIONS:
            await self.ask("POST", f"{path}/fork", {}, opens=True)
        else:
            await self.stream(f"/v1/sessions{path}/generate", {"text": self.text()})

    def text(self) -> str:
        return "".join(self.chance.choices("the quick brown fox ", k=self.chance.randint(1, 200)))

    async def ask(self, method: str, path: str, body: Any = None, *, opens: bool = False) -> None:
        answer = await self.http.request(method, f"/v1/sessions{path}", json=body)
        self.heard.statuses[str(answer.status_code)] += 1
        if opens and answer.is_success:
            self.sessions.append(answer.json()["id"])

    async def stream(self, path: str, body: dict[str, Any]) -> None:
        asked, told, status = time.perf_counter(), 0.0, "cut off"
        body["max_tokens"] = self.chance.randint(1, 200)
        async with self.http.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:") and '"error"' not in line:
                    now = time.perf_counter()
                    (self.heard.intervals if told else self.heard.first).append(now - (told or asked))
                    told = now
                    status = str(answer.status_code)
        self.heard.statuses[status] += 1


def server_figures(pid: int, sessions_file: Path) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    log = sessions_file.with_name(f"{sessions_file.name}-wal")
    return {
        "resident MB": round(megabytes("VmRSS", pid), 1),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": next(int(line.split()[1]) for line in lines if line.startswith("Threads")),
        "file MB": round(sessions_file.stat().st_size / 2**20, 2),
        "log MB": round(log.stat().st_size / 2**20, 2),
    }


async def soak(port: int, pid: int, sessions_file: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=arguments.streams)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as http:
        clients = [Client(http, number, arguments.pause) for number in range(arguments.streams)]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        for minute in range(1, arguments.minutes + 1):
            before, heard = cpu_seconds(pid), Heard()
            for client in clients:
                client.heard = heard
            done, _ = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            line: dict[str, Any] = {"minute": minute, **server_figures(pid, sessions_file), **heard.times()}
            line |= {"processor %": round((cpu_seconds(pid) - before) / 0.6, 1), "tokens": len(heard.intervals)}
            line |= {"sessions": sum(len(client.sessions) for client in clients), "statuses": dict(heard.statuses)}
            lines.append(line)
            with arguments.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
        for task in tasks:
            task.cancel()
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    names = [name for name, value in lines[0].items() if name not in ("minute", "statuses")]
    rows = ["| median of five minutes | first | last |", "|---|---:|---:|"]
    for name in names:
        first, last = (statistics.median(line[name] for line in part) for part in (lines[:5], lines[-5:]))
        rows.append(f"| {name} | {first:g} | {last:g} |")
    statuses = sum((Counter(line["statuses"]) for line in lines), Counter[str]())
    return "\n".join([*rows, "", f"requests by status: {dict(statuses)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="clients (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=16.0, help="mean seconds (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8766, help="(default: %(default)s)")
    parser.add_argument("--log", type=Path, default=Path("soak.jsonl"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sessions_file = Path(folder) / "sessions.sqlite"
        with running(serve, arguments.port, sessions_file) as pid:
            print(table(asyncio.run(soak(arguments.port, pid, sessions_file, arguments))))


if __name__ == "__main__":
    main()
