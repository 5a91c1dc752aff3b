"""`recurra serve` and `recurra explore`: an HTTP server of trained language models, and its page in the browser."""

import os
import threading
import time
import urllib.request
import webbrowser
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from recurra._files.reading import read_text
from recurra.checks import sentence
from recurra.cli.arguments import FILE, NUMBER, REAL, add_checkpoint, command_parser, split_overrides
from recurra.decoding.linear import DTYPES

_DESCRIPTION = """\
Serve trained runs over HTTP: OpenAI's /v1/completions and /v1/chat/completions, streams by name that last in
/v1/sessions, and the explorer, a page to look into a model. Many streams are written side by side. Sessions are written
to disk after every turn.

Without an API key the server listens on this machine only. RECURRA_API_KEY in the environment, or the lines of
--api-key-file, are the keys."""


def serve(words: Sequence[str]) -> int:
    own, overrides = split_overrides(words)
    arguments = _parser().parse_args(own)
    from recurra.serve._app import serve_runs  # loads FastAPI

    return serve_runs(arguments.runs, _settings(arguments), arguments, overrides)


def _parser(name: str = "serve", description: str = _DESCRIPTION) -> ArgumentParser:
    parser = command_parser(name, description)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="folder of a run; its name is the model's name")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 chooses a free one (default: 8000)")
    add("--api-key-file", **FILE, help="file with an API key on each line")
    add("--sessions", **FILE, help="where sessions are kept (default: sessions.sqlite in the first RUN)")
    kinds = (*DTYPES, "model")
    add(
        "--weights",
        choices=kinds,
        default="float32",
        help="type of packed weights; model packs none (default: float32)",
    )
    add("--threads", **NUMBER, help="threads of the model (default: as many as cores)")
    add("--max-streams", **NUMBER, default=1024, help="streams at the same time (default: 1024)")
    add("--max-queue", **NUMBER, default=1024, help="requests that wait; more get 429 (default: 1024)")
    add("--max-tokens", **NUMBER, default=65_536, help="tokens that a request may bring or ask for (default: 65536)")
    most = "memory for states after prompts that were read before; 0 keeps none (default: 256 MiB)"
    add("--prefix-cache-bytes", **NUMBER, default=256 * 2**20, help=most)
    add("--max-connections", **NUMBER, default=4096, help="at most 64 below the limit of open files (default: 4096)")
    add("--header-seconds", **REAL, default=10.0, help="for the headers of a request (default: 10)")
    add("--body-seconds", **REAL, default=60.0, help="for a body, and to read of a response (default: 60)")
    add("--log-file", **FILE, help="log requests as JSON lines (default: only problems, on the standard error)")
    add_checkpoint(parser)
    return parser


def _settings(arguments: Namespace):  # type: ignore[no-untyped-def]
    from recurra.serve._http import ServeSettings

    keys = [os.environ["RECURRA_API_KEY"]] if os.environ.get("RECURRA_API_KEY") else []
    if arguments.api_key_file is not None:
        path = arguments.api_key_file
        of_file = [line.strip() for line in read_text(path, "the file of --api-key-file").splitlines() if line.strip()]
        if not of_file or any(len(key.split()) > 1 for key in of_file):
            got = f"{path}, with a line that has blanks inside" if of_file else f"{path}, which has no key"
            raise ValueError(
                sentence("--api-key-file", got, "a file with an API key on each line, and nothing beside it")
            )
        keys += of_file
    return ServeSettings(
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(keys),
        sessions_file=arguments.sessions or Path(arguments.runs[0]) / "sessions.sqlite",
        max_streams=arguments.max_streams,
        max_queue=arguments.max_queue,
        max_tokens=arguments.max_tokens,
        prefix_cache_bytes=arguments.prefix_cache_bytes,
        max_connections=arguments.max_connections,
        header_seconds=arguments.header_seconds,
        body_seconds=arguments.body_seconds,
    )


_EXPLORE = """\
Serve runs on this machine, as `recurra serve` does, and open the explorer in the browser. It shows text by surprise,
gates as they open and close, and forks of a stream; runs on Memory Horizon become a game."""


def explore(words: Sequence[str]) -> int:
    own, overrides = split_overrides(words)
    made = _parser("explore", _EXPLORE)
    made.add_argument("--no-browser", action="store_true", help="print the address, and open nothing")
    arguments = made.parse_args(own)
    from recurra.serve._app import serve_runs  # loads FastAPI

    address = _page_address(arguments.host, arguments.port)
    print(f"the explorer: {address} (stop it with Ctrl+C)", flush=True)
    if not arguments.no_browser:
        threading.Thread(target=_open_when_ready, args=(address, webbrowser.open), daemon=True).start()
    return serve_runs(arguments.runs, _settings(arguments), arguments, overrides)


def _page_address(host: str, port: int) -> str:
    if port == 0:
        raise ValueError("--port is 0; expected a fixed one: the page finds its streams again at the same address only")
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # every address of this machine, this one among them
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _open_when_ready(address: str, open_page: Callable[[str], object], *, seconds: float = 300) -> bool:
    """Wait until a server answers, and open its page; return whether it did."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would look on its own machine
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with direct.open(f"{address}health", timeout=5):
                open_page(address)
                return True
        except OSError:
            time.sleep(0.2)
    return False
