"""`recurra serve` and `recurra explore`: an HTTP server of trained language models, and its page in the browser."""

import os
import threading
import time
import urllib.request
import webbrowser
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields

from recurra._files.reading import read_text
from recurra.checks import sentence
from recurra.serve._app import serve_runs
from recurra.serve._http import ServeSettings
from recurra.train.shipped import find_run

_TEXT_MODEL = "books"


def serve(arguments: Namespace) -> int:
    return serve_runs(arguments.runs, _settings(arguments), arguments, arguments.overrides)


def _settings(arguments: Namespace) -> ServeSettings:
    keys = [os.environ["RECURRA_API_KEY"]] if os.environ.get("RECURRA_API_KEY") else []
    if arguments.api_key_file is not None:
        path = arguments.api_key_file
        of_file = [line.strip() for line in read_text(path, "the file of --api-key-file").splitlines() if line.strip()]
        if not of_file or any(len(key.split()) > 1 for key in of_file):
            got = f"{path}, with a line that contains spaces" if of_file else f"{path}, which has no key"
            raise ValueError(sentence("--api-key-file", got, "a file with one API key per line and nothing else"))
        keys += of_file
    sessions_file = arguments.sessions or find_run(arguments.runs[0]) / "sessions.sqlite"
    names = {field.name for field in fields(ServeSettings)} & vars(arguments).keys()
    given = {name: getattr(arguments, name) for name in names}
    return ServeSettings(api_keys=tuple(keys), sessions_file=sessions_file, **given)


def explore(arguments: Namespace) -> int:
    address = _page_address(arguments.host, arguments.port)
    if not arguments.runs:
        arguments.runs = [_TEXT_MODEL]
        print(f"no run given: opening {_TEXT_MODEL}, a text model in the package", flush=True)
    for run in arguments.runs:
        find_run(run)
    print(f"loading; the explorer will be at {address} (Ctrl+C stops it)", flush=True)
    if not arguments.no_browser:
        threading.Thread(target=_open_when_ready, args=(address, webbrowser.open), daemon=True).start()
    return serve_runs(arguments.runs, _settings(arguments), arguments, arguments.overrides)


def _page_address(host: str, port: int) -> str:
    if port == 0:
        raise ValueError("--port is 0; expected a fixed port: the page finds its streams only at the same address")
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
