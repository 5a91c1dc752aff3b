"""Small models, an engine without a thread, and servers that really listen."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import openai
import pytest
import torch
import uvicorn

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._app import uvicorn_config
from recurra.serve._engine import Engine
from recurra.serve._http import ServeSettings
from recurra.serve._model import ServedModel
from recurra.serve._requests import EndEvent, Event, Request, TokenEvent
from recurra.serve._service import Service
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig

VOCABULARY = 40


class Letters:
    """A tokenizer of 40 letters."""

    letters = "abcdefghijklmnopqrstuvwxyz .,;:!?\n012345"
    fingerprint = "letters"

    def __len__(self) -> int:
        return len(self.letters)

    def encode(self, text: str) -> np.ndarray:
        return np.array([max(0, self.letters.find(letter)) for letter in text], dtype=np.int64)

    def decode(self, tokens) -> str:
        return "".join(self.letters[int(token)] for token in tokens)


def language_model(seed: int = 0, output_size: int | None = None, mixer: str = "gateloop") -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LanguageModel(LanguageModelConfig(VOCABULARY, output_size, 2, 16, 24, mixer=mixer)).eval()


@pytest.fixture(scope="session")
def exact() -> ServedModel:
    """In float64, where the size of a batch makes no difference that could be seen."""
    return ServedModel("exact", language_model().double(), Letters())


@pytest.fixture(scope="session")
def models() -> list[ServedModel]:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    return [
        ServedModel("letters", language_model(), Letters(), chat_template=template),
        ServedModel("numbers", language_model(1)),
        ServedModel("classes", language_model(2, output_size=7)),
    ]


class Rounds:
    """An engine that runs in the test's own thread, and all that it delivered."""

    def __init__(self, **limits: int) -> None:
        self.events: dict[Request, list[Event]] = {}
        self.engine = Engine(self._deliver, **limits)

    def _deliver(self, events: dict[Request, list[Event]]) -> None:
        for turn, some in events.items():
            self.events.setdefault(turn, []).extend(some)

    def run(self, *turns: Request, rounds: int | None = None) -> None:
        for turn in turns:
            self.engine.submit(turn)
        with torch.inference_mode():
            while self.engine.is_busy and rounds != 0:
                self.engine.round()
                rounds = None if rounds is None else rounds - 1

    def written(self, turn: Request, choice: int = 0) -> list[int]:
        return [e.id for e in self.tokens(turn) if not e.was_read and e.choice == choice]

    def tokens(self, turn: Request) -> list[TokenEvent]:
        return [event for event in self.events.get(turn, []) if isinstance(event, TokenEvent)]

    def ends(self, turn: Request) -> list[EndEvent]:
        return [event for event in self.events.get(turn, []) if isinstance(event, EndEvent)]


def asking(n_tokens: int, seed: int = 0, temperature: float = 1.0, stop: tuple[str, ...] = ()) -> GenerationConfig:
    sampling = SamplingConfig(temperature=temperature)
    return GenerationConfig(max_tokens=n_tokens, sampling=sampling, seed=seed, stop=stop)


class Running:
    """A server in a thread of the test's process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        config = uvicorn_config(service)
        config.timeout_graceful_shutdown = 1
        self._server = uvicorn.Server(config)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._clients = contextlib.ExitStack()

    def __enter__(self) -> "Running":
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def client(self, **headers: str) -> httpx.Client:
        """A client that is closed when the server ends, if not before. It reads no certificates, which takes long."""
        return self._clients.enter_context(httpx.Client(base_url=self.url, headers=headers, timeout=60, verify=False))

    def openai_client(self, key: str) -> openai.OpenAI:
        """OpenAI's own client, closed when the server ends."""
        plain = openai.DefaultHttpxClient(verify=False)
        return self._clients.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=plain)
        )


@pytest.fixture
def serving(models) -> Iterator[Callable[..., Running]]:
    """Start servers, each with its own settings; all end with the test."""
    with contextlib.ExitStack() as running:
        yield lambda **limits: running.enter_context(
            Running(Service(limits.pop("models", models), ServeSettings(**limits), threads=1))
        )


@pytest.fixture(scope="module")
def server(models) -> Iterator[Running]:
    """One server for the tests of a module that leave nothing behind."""
    with Running(Service(models, ServeSettings(), threads=1)) as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        yield client
