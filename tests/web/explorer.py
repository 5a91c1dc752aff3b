"""What somebody does with the explorer, and what they see of it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Page = Any
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browsing(*flags: str) -> Iterator[Any]:
    """A browser without a window, with these flags beside our own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install recurra[dev]")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium")
    with playwright.sync_playwright() as started:
        own = ["--no-sandbox", "--disable-dev-shm-usage"]
        yield started.chromium.launch(executable_path=program, args=[*own, *flags])


def open_explorer(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("html[data-ready]")


def pane(letter: str = "A") -> str:
    return f"[data-letter={letter}]"


def wait_for(page: Page, position: int, letter: str = "A") -> None:
    """Wait until a stream stands after so many tokens, and rests."""
    page.wait_for_selector(f"{pane(letter)}[data-status=ready][data-position='{position}']")
    wait_until_drawn(page)


def wait_until_drawn(page: Page) -> None:
    """Wait for what the page draws in its next frame, after a key, a click or a change of a stream."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def position(page: Page, letter: str = "A") -> int:
    return int(page.get_attribute(pane(letter), "data-position"))


def choose_greedily(page: Page, n_tokens: int) -> None:
    page.fill("label:has-text('temperature') input", "0")
    page.fill("label:has-text('tokens') input", str(n_tokens))
    page.keyboard.press("Tab")


def read(page: Page, text: str, *, then_write: bool = False) -> None:
    page.fill("textarea", text)
    page.press("textarea", "Enter" if then_write else "Control+Enter")


def text(page: Page, letter: str = "A", which: str = "") -> str:
    """The text of a stream: all, or of the tokens that it "read" or has "written"."""
    spans = page.locator(f"{pane(letter)} .token{f'.{which}' if which else ''}").all_text_contents()
    return "".join(spans).replace("↵", "")


def gate_colours(page: Page, letter: str = "A") -> int:
    """How many colours the map of gates has."""
    return page.evaluate(
        """(selector) => {
            const canvas = document.querySelector(selector + " .gates-canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
        pane(letter),
    )
