"""`recurra serve` and `recurra explore`: an HTTP server of trained language models, and its page in the browser."""

import os
import threading
import webbrowser
from argparse import Namespace
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
    given = arguments.runs, _settings(arguments), arguments, arguments.overrides
    if arguments.no_browser:
        return serve_runs(*given)
    return serve_runs(*given, threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start)


def _page_address(host: str, port: int) -> str:
    if port == 0:
        raise ValueError("--port is 0; expected a fixed port: the page finds its streams only at the same address")
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # every address of this machine, this one among them
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
