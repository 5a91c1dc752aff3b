"""`recurra explore`: serve runs, and open the explorer in the browser."""

import threading
import time
import urllib.request
import webbrowser
from collections.abc import Callable, Sequence

from recurra.cli.arguments import split_overrides
from recurra.cli.serve import parser, settings

_DESCRIPTION = """\
Look into trained runs: serve them on this machine, as `recurra serve` does, and open the explorer in the browser. It
shows text by surprise, gates as they open and close, and forks of a stream; runs on Memory Horizon become a game. Two
runs stand side by side. Takes the arguments of `recurra serve`."""


def run(words: Sequence[str]) -> int:
    """Serve until a signal comes; open the page as soon as it is there."""
    own, overrides = split_overrides(words)
    made = parser("explore", _DESCRIPTION)
    made.add_argument("--no-browser", action="store_true", help="print the address, and open nothing")
    arguments = made.parse_args(own)
    from recurra.serve.app import serve_runs  # loads FastAPI

    address = _page_address(arguments.host, arguments.port)
    print(f"the explorer: {address} (stop it with Ctrl+C)", flush=True)
    if not arguments.no_browser:
        threading.Thread(target=_open_when_ready, args=(address, webbrowser.open), daemon=True).start()
    return serve_runs(arguments.runs, settings(arguments), arguments, overrides)


def _page_address(host: str, port: int) -> str:
    """Return the address of the page."""
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
