"""A server that is killed under load loses no session and no prefix."""

import asyncio
import sqlite3
import time

import httpx

from benchmarks import serve_kills

from .conftest import Running

BODY = {"model": "small", "prompt": [number % 50 for number in range(100)], "max_tokens": 3}


def n_cached(answer: httpx.Response) -> int:
    return answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


class Asked(serve_kills.Killed):
    """A server that has saved the prefix of a prompt before it is asked for anything else."""

    async def client(self) -> httpx.AsyncClient:
        async with await super().client() as client:
            assert n_cached(await client.post("/v1/completions", json=BODY)) == 0
        database, end = sqlite3.connect(self._folder / "sessions.sqlite"), time.monotonic() + 60
        while not database.execute("SELECT count(*) FROM prefixes").fetchone()[0]:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        database.close()
        return await super().client()


def test_a_killed_server_leaves_every_session_as_its_client_saw_it_and_its_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_kills, "Killed", Asked)
    found = serve_kills.run(tmp_path, 1)
    assert found["kills"] == 1
    assert found["requests"] > 0
    with Running(serve_kills.service_of(tmp_path / "sessions.sqlite")) as running:
        assert n_cached(running.client().post("/v1/completions", json=BODY)) == 99
