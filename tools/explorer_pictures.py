"""The pictures of docs/explorer.md: `python -m tools.explorer_pictures TEXT_RUN HORIZON_RUN`.

Exports both runs with `recurra export web` and photographs the page in a browser without a window. What the models
write is drawn at random, so that every call makes other pictures. Needs chromium and the package playwright.
"""

import functools
import http.server
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from recurra import open_run
from recurra.train.formats import export_web

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
PROMPT = "the company said it expects sales to rise in the third quarter\n"
COLOURS = 200
"""Of a picture: its palette keeps it small."""


def main(text_run: str, horizon_run: str) -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        places = [Path(folder) / name for name in ("text", "horizon")]
        for place, run in zip(places, (text_run, horizon_run)):
            export_web([open_run(run)], place)
        with _served(places[0]) as text, _served(places[1]) as horizon:
            _text(browser, text, "light", (1360, 760), "explorer-text")
            _text(browser, text, "dark", (390, 844), "explorer-phone")
            _forks(browser, text)
            _game(browser, horizon)
        browser.close()


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


def _opened(browser: Any, address: str, scheme: str, size: tuple[int, int]) -> Any:
    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


def _written(page: Any) -> None:
    page.fill("textarea", PROMPT)
    page.press("textarea", "Enter")
    page.wait_for_selector("[data-status=writing]")
    page.wait_for_selector("[data-status=ready]")
    page.evaluate("document.activeElement.blur()")


def _text(browser: Any, address: str, scheme: str, size: tuple[int, int], name: str) -> None:
    page = _opened(browser, address, scheme, size)
    _written(page)
    if size[0] > 1000:
        page.click(".token >> nth=17")
    _keep(page, name)


def _forks(browser: Any, address: str) -> None:
    page = _opened(browser, address, "dark", (1360, 760))
    _written(page)
    page.click(".token >> nth=24")
    page.keyboard.press("f")
    page.wait_for_selector("[data-letter=B]")
    page.keyboard.press("g")
    page.wait_for_selector("[data-letter=B][data-status=writing]")
    page.wait_for_selector("[data-letter=B][data-status=ready]")
    _keep(page, "explorer-forks")


def _game(browser: Any, address: str) -> None:
    page = _opened(browser, address, "light", (1360, 680))
    for number in range(1, 3):
        page.click(".key.wide")
        page.wait_for_selector(f"[data-status=ready][data-position='{20 * number}']")
    for key in "r341":
        page.keyboard.press(key)
        page.wait_for_timeout(300)
    page.wait_for_selector("[data-status=ready][data-position='44']")
    _keep(page, "explorer-game")


def _keep(page: Any, name: str) -> None:
    page.mouse.move(2, 2)
    page.wait_for_timeout(500)
    path = FIGURES / f"{name}.png"
    page.screenshot(path=str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
