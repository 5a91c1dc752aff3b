"""The explorer on `recurra serve`, in a browser: text by surprise, gates, forks, and a server that dies."""

import contextlib
import itertools
import json
import math
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.processes import Program
from tests.web.conftest import PATIENCE
from tests.web.explorer import (
    choose_greedily,
    gate_colours,
    open_explorer,
    pane,
    position,
    read,
    text,
    wait_for,
    wait_until_drawn,
)

pytest.importorskip("fastapi", reason="needs the extra serve: pip install recurra[serve]")
pytest.importorskip("uvicorn", reason="needs the extra serve: pip install recurra[serve]")
pytest.importorskip("sse_starlette", reason="needs the extra serve: pip install recurra[serve]")

from recurra import open_run
from recurra.data import memory_horizon_targets
from recurra.generation import SamplingConfig, Stream

PROMPT = "the dog saw"
N_TOKENS = 24
STARTED_WITHIN = 300
GONE_WITHIN = 60
"""Seconds."""


class Server:
    """`recurra serve`, which can be killed and started again at the same address."""

    def __init__(self, runs: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        names = [str(runs / name) for name in ("words", "bpe", "horizon")]
        options = ["--port", str(self.port), "--sessions", str(folder / "sessions.sqlite"), "--threads", "1"]
        words = ["serve", *names, *options, "--weights", "model"]  # no kernels to compile
        self._source, self._folder = f"from recurra.cli import main\nraise SystemExit(main({words!r}))", folder
        self.address = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        self._program = Program(self._source, self._folder, OMP_NUM_THREADS="1")
        end = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}health", timeout=5):
                return
            time.sleep(0.05)
        raise AssertionError(f"the server did not start\n{self._program.kill().said}")

    def kill(self) -> None:
        self._program.kill()


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory) -> Iterator[Server]:
    started = Server(runs, tmp_path_factory.mktemp("server"))
    yield started
    started.kill()


def stream_of(runs: Path, name: str) -> Stream:
    run = open_run(runs / name)
    return Stream(run.model, run.tokenizer)


def continued(runs: Path, name: str, n_tokens: int) -> str:
    stream = stream_of(runs, name)
    stream.feed(PROMPT)
    return "".join(stream.generate_text(n_tokens, sampling=SamplingConfig(temperature=0.0)))


def write_greedily(page, server: Server) -> None:
    """Open the page and let it continue the prompt."""
    open_explorer(page, server.address)
    choose_greedily(page, N_TOKENS)
    read(page, PROMPT, then_write=True)
    wait_for(page, 3 + N_TOKENS)


def refuse(route, status: int, code: str) -> None:
    route.fulfill(status=status, json={"error": {"message": f"refused: {code}", "code": code}})


def test_text_surprise_and_gates(page, server, runs):
    write_greedily(page, server)
    assert text(page, which="read") == PROMPT
    assert text(page, which="written") == continued(runs, "words", N_TOKENS)
    assert gate_colours(page) > 20
    stream = stream_of(runs, "words")
    *first, last = stream.encode(PROMPT).tolist()
    expected = torch.log_softmax(stream.feed(first), -1)
    page.click(f"{pane()} .token >> nth=2")
    wait_until_drawn(page)
    told = page.inner_text(".inspector p >> nth=0")
    assert float(re.search(r"([\d.]+) bits", told)[1]) == pytest.approx(-float(expected[last]) / math.log(2), abs=0.06)
    best = stream.tokenizer.decode([int(expected.argmax())]).strip() or "↵"
    assert page.locator(".expected .name").first.inner_text() == best
    state = sum(x.numel() * x.element_size() for layer in stream.state.layers for x in layer)
    assert page.inner_text(".of-state dd") == f"{state} B"


def test_two_forks_and_two_models_go_on_side_by_side(page, server, runs):
    write_greedily(page, server)
    page.click(f"{pane()} .token >> nth=2")  # the prompt's last token
    page.click("text=Fork after this token")
    wait_for(page, 3, "B")
    page.click(f"{pane('B')} button.go")
    wait_for(page, 3 + N_TOKENS, "B")
    assert text(page, "B") == text(page, "A")
    page.click("button.chip:has-text('all')")
    read(page, "a cat ran")
    for letter in "AB":
        wait_for(page, 6 + N_TOKENS, letter)
    page.select_option(f"{pane('B')} select.compare", "bpe")  # it reads the text so far
    page.wait_for_selector(f"{pane('C')}[data-status=ready]")
    wait_for(page, len(stream_of(runs, "bpe").encode(text(page, "B"))), "C")
    assert text(page, "C") == text(page, "B")


def test_sessions_are_found_again(page, server):
    write_greedily(page, server)
    before = text(page)
    page.reload()
    wait_for(page, 3 + N_TOKENS)
    assert text(page) == before
    assert gate_colours(page) > 20
    read(page, "the dog")
    wait_for(page, 5 + N_TOKENS)


def test_a_killed_server_costs_nothing_that_was_shown(page, server, runs):
    """It dies while it writes. When it is back, the stream goes on from exactly what the page shows."""
    open_explorer(page, server.address)
    choose_greedily(page, 10_000)
    read(page, PROMPT, then_write=True)
    while position(page) < 40:
        page.wait_for_timeout(5)
    server.kill()
    page.wait_for_selector(f"{pane()}[data-status=waiting]")
    assert "waiting for the server" in page.inner_text(".status")
    wait_until_drawn(page)
    shown, reached = text(page), position(page)
    server.start()
    wait_for(page, reached)
    assert text(page) == shown
    choose_greedily(page, N_TOKENS)
    page.click("button.go")
    wait_for(page, reached + N_TOKENS)
    assert text(page) == PROMPT + continued(runs, "words", reached - 3 + N_TOKENS)


def test_a_slow_way_back_is_gone_once(page, server):
    """The page asks every second whether the server is back; what has begun then goes on."""
    write_greedily(page, server)
    server.kill()
    read(page, "the dog")
    page.wait_for_selector(f"{pane()}[data-status=waiting]")
    held = []
    page.route("**/v1/sessions/*/rewind", lambda route: held.append(route))
    server.start()
    while not held:
        page.wait_for_timeout(20)
    page.wait_for_timeout(3500)
    assert len(held) == 1
    held[0].continue_()
    wait_for(page, 3 + N_TOKENS)
    read(page, "the dog")
    wait_for(page, 5 + N_TOKENS)


def test_whether_the_server_is_back_is_asked_once_at_a_time(page, server):
    """Late answers would bring a stream back that is back already, and writes."""
    write_greedily(page, server)
    held = []
    page.route("**/health", lambda route: held.append(route))
    page.route("**/generate", lambda route: refuse(route, 503, "loading"))
    page.click(f"{pane()} button.go")
    page.wait_for_selector(f"{pane()}[data-status=waiting]")
    page.unroute("**/generate")
    while not held:
        page.wait_for_timeout(20)
    page.wait_for_timeout(2500)
    assert len(held) == 1
    held[0].continue_()
    wait_for(page, 3 + N_TOKENS)


def test_a_stream_waits_while_the_server_has_no_room(page, server):
    """Its session is not given up."""
    write_greedily(page, server)
    before = sessions(server)
    page.route("**/rewind", lambda route: refuse(route, 429, "queue_full"))
    page.reload()
    page.wait_for_selector(f"{pane()}[data-status=waiting]")
    page.unroute("**/rewind")
    wait_for(page, 3 + N_TOKENS)
    assert sessions(server) == before


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_an_answer_that_the_server_cut_short_is_an_error(page, server, reason):
    write_greedily(page, server)
    end = json.dumps({"finish_reason": reason, "position": 3 + N_TOKENS, "text": ""})
    answer = f"event: end\r\ndata: {end}\r\n\r\n"
    page.route("**/generate", lambda route: route.fulfill(body=answer, content_type="text/event-stream"))
    page.click(f"{pane()} button.go")
    page.wait_for_selector(f"{pane()}[data-status=failed]")
    wait_until_drawn(page)
    assert f"the server ended this turn early ({reason})" in page.inner_text(".status")
    page.unroute("**/generate")
    page.click(f"{pane()} button.go")
    wait_for(page, 3 + 2 * N_TOKENS)


def test_a_text_that_is_refused_can_be_sent_again(page, server):
    """The model does not go on without it."""
    open_explorer(page, server.address)
    choose_greedily(page, N_TOKENS)
    page.route("**/feed", lambda route: refuse(route, 400, "too_many_tokens"))
    read(page, PROMPT, then_write=True)
    page.wait_for_selector(f"{pane()}[data-status=failed][data-position='0']")
    assert "too_many_tokens" in page.inner_text(".status")
    assert page.input_value("textarea") == PROMPT
    page.unroute("**/feed")
    page.press("textarea", "Enter")
    wait_for(page, 3 + N_TOKENS)
    assert page.input_value("textarea") == ""


def test_a_stream_that_is_stopped_while_it_reads_does_not_write(page, server):
    page.add_init_script(NO_END_OF_READING)
    open_explorer(page, server.address)
    choose_greedily(page, N_TOKENS)
    read(page, PROMPT, then_write=True)
    page.wait_for_selector(f"{pane()}[data-status=reading]:not([data-position='0'])")
    page.click(f"{pane()} button.go")
    page.wait_for_selector(f"{pane()}[data-status=ready]")
    wait_until_drawn(page)
    assert PROMPT.startswith(text(page))
    assert not text(page, which="written")


NO_END_OF_READING = """
const fetched = window.fetch;
window.fetch = async (path, options) => {
    const answer = await fetched(path, options);
    if (!String(path).endsWith("/feed")) return answer;
    const { value } = await answer.body.getReader().read();
    const start = (stream) => {
        stream.enqueue(value);
        options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
    };
    return new Response(new ReadableStream({ start }));
};
"""
"""Of what a server sends while a stream reads, only the first piece arrives."""


def test_a_stream_whose_session_is_gone_reads_its_tokens_again(page, server, runs):
    before = sessions(server)
    write_greedily(page, server)
    (name,) = sessions(server).keys() - before.keys()
    close(server, name)
    page.click(f"{pane()} button.go")
    page.wait_for_selector(f"{pane()}[data-status=failed]")
    assert "does not exist" in page.inner_text(".status")
    page.click(f"{pane()} button.go")
    wait_for(page, 3 + 2 * N_TOKENS)
    assert text(page) == PROMPT + continued(runs, "words", 2 * N_TOKENS)


def test_a_stream_that_was_refused_its_way_back_can_be_forked_and_goes_on(page, server, runs):
    write_greedily(page, server)
    for path in ("**/rewind", "**/v1/sessions"):
        page.route(path, lambda route: refuse(route, 500, "turn_failed"))
    page.reload()
    page.wait_for_selector(f"{pane()}[data-status=failed]")
    page.unroute("**/v1/sessions")
    page.click(f"{pane()} button:has-text('Fork')")
    wait_for(page, 3 + N_TOKENS, "B")
    page.unroute("**/rewind")
    for letter in "AB":
        page.click(f"{pane(letter)} button.go")
        wait_for(page, 3 + 2 * N_TOKENS, letter)
        assert text(page, letter) == PROMPT + continued(runs, "words", 2 * N_TOKENS)


def test_the_last_stream_stays_while_no_other_can_be_opened(page, server):
    write_greedily(page, server)
    page.route("**/v1/sessions", lambda route: route.abort())
    page.click(f"{pane()} button.close")
    page.wait_for_selector(".notice:has-text('the server does not answer')")
    page.keyboard.press("]")
    page.unroute("**/v1/sessions")
    page.click(f"{pane()} button.go")
    wait_for(page, 3 + 2 * N_TOKENS)
    page.click(f"{pane()} button.close")
    wait_for(page, 0)
    assert page.is_hidden(".notice")


def sessions(server) -> dict[str, int]:
    """Where the server's sessions stand, by their names."""
    with urllib.request.urlopen(f"{server.address}v1/sessions?limit=1000", timeout=30) as answer:
        return {one["id"]: one["position"] for one in json.load(answer)["data"]}


def close(server, name: str) -> None:
    """Close a session, as another client may."""
    asked = urllib.request.Request(f"{server.address}v1/sessions/{name}", method="DELETE")
    with urllib.request.urlopen(asked, timeout=30):
        pass


def write_without_end(page, server: Server) -> str:
    """Open the page and let it write, until some tokens are there; give its session's name."""
    before = sessions(server)
    open_explorer(page, server.address)
    choose_greedily(page, 10_000)
    read(page, PROMPT, then_write=True)
    while position(page) < 30:
        page.wait_for_timeout(5)
    (name,) = sessions(server).keys() - before.keys()
    return name


def test_a_stopped_stream_stands_where_it_is_shown(page, server, runs):
    """The server writes on until it notices; what came after the last token that is shown is taken back."""
    name = write_without_end(page, server)
    page.click(f"{pane()} button.go")
    page.wait_for_selector(f"{pane()}[data-status=ready]")
    wait_until_drawn(page)
    reached = position(page)
    assert sessions(server)[name] == reached
    choose_greedily(page, N_TOKENS)
    page.click(f"{pane()} button.go")
    wait_for(page, reached + N_TOKENS)
    whole, shown = PROMPT + continued(runs, "words", reached - 3 + N_TOKENS), text(page)
    is_whole = reached + N_TOKENS <= 2000  # the page shows the end of a longer stream, as a busy machine may make it
    assert shown == whole if is_whole else whole.endswith(shown) and len(shown) > N_TOKENS


def test_a_stream_that_is_closed_while_it_writes_is_gone(page, server):
    name = write_without_end(page, server)
    page.click(f"{pane()} button.close")
    while name in sessions(server):
        page.wait_for_timeout(20)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert position(page) == 0


def test_a_stream_that_is_closed_on_its_way_back_is_gone(page, server):
    """The server no longer has its session, and is slow to open the one that replaces it."""
    write_greedily(page, server)
    held = []
    page.route("**/generate", lambda route: refuse(route, 503, "loading"))
    page.route("**/rewind", lambda route: refuse(route, 404, "session_not_found"))
    page.route("**/v1/sessions", lambda route: route.continue_() if held else held.append(route))
    page.click(f"{pane()} button.go")
    while not held:
        page.wait_for_timeout(20)
    page.click(f"{pane()} button.close")
    wait_for(page, 0)  # another stream stands in its place
    opened = held[0].fetch()
    held[0].fulfill(response=opened)
    replacement = opened.json()["id"]
    end = time.monotonic() + GONE_WITHIN
    while replacement in sessions(server) and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert replacement not in sessions(server)


@pytest.fixture
def second_tab(page) -> object:
    """Another tab of the same browser."""
    opened = page.context.new_page()
    opened.set_default_timeout(PATIENCE)
    return opened


def test_a_second_tab_has_copies_of_the_streams(page, second_tab, server, runs):
    """Each tab continues its own, also after a reload; once the other is closed, a tab finds the streams of both."""
    write_greedily(page, server)
    open_explorer(second_tab, server.address)
    wait_for(second_tab, 3 + N_TOKENS)
    assert text(second_tab) == text(page)
    read(second_tab, "a dog and the cat ran")
    wait_for(second_tab, 9 + N_TOKENS)
    beside = text(second_tab)
    page.click(f"{pane()} button.go")
    wait_for(page, 3 + 2 * N_TOKENS)
    whole = PROMPT + continued(runs, "words", 2 * N_TOKENS)
    assert text(page) == whole
    for tab, shown in ((second_tab, beside), (page, whole)):
        tab.reload()
        tab.wait_for_selector(f"{pane()}[data-status=ready]")
        wait_until_drawn(tab)
        assert tab.locator("article.pane").count() == 1
        assert text(tab) == shown
    second_tab.close()
    page.reload()
    wait_for(page, 3 + 2 * N_TOKENS, "A" if text(page, "A") == whole else "B")
    assert {text(page, letter) for letter in "AB"} == {whole, beside}


def test_tabs_without_locks_notice_that_they_share_a_session(page, second_tab, server, runs):
    """Over plain http the browser offers no locks. The tab that finds its session moved on opens another one."""
    page.context.add_init_script("Object.defineProperty(Navigator.prototype, 'locks', { get: () => undefined })")
    write_greedily(page, server)
    before = sessions(server)
    open_explorer(second_tab, server.address)
    wait_for(second_tab, 3 + N_TOKENS)
    assert sessions(server) == before
    read(second_tab, "a dog and the cat ran")
    wait_for(second_tab, 9 + N_TOKENS)
    page.click(f"{pane()} button.go")
    end = time.monotonic() + GONE_WITHIN
    while sessions(server).keys() == before.keys() and time.monotonic() < end:
        page.wait_for_timeout(20)
    wait_for(page, 3 + N_TOKENS)
    page.click(f"{pane()} button.go")
    wait_for(page, 3 + 2 * N_TOKENS)
    assert text(page) == PROMPT + continued(runs, "words", 2 * N_TOKENS)


def test_the_game_against_a_model_on_the_server(page, server, runs):
    open_explorer(page, server.address)
    page.select_option("[aria-label='Open a new stream']", "horizon")
    played = [2, 3, 4, 5, 1, 4]
    page.wait_for_selector(".tape")
    page.focus(".tape")
    for number, token in enumerate(played, 1):
        page.keyboard.press("r" if token == 5 else str(token))
        wait_for(page, number, "B")
    with torch.no_grad():
        answers = open_run(runs / "horizon").model(torch.tensor([played]))[0][0].argmax(-1).tolist()
    targets = memory_horizon_targets(torch.tensor([played]), modulus=7)[0].tolist()
    assert page.locator(".cell .answer").all_text_contents() == list(map(str, answers))
    n_right = sum(answer == target for answer, target in zip(answers, targets))
    assert page.inner_text(".score").startswith(f"{n_right} of {len(played)} answers right")


def test_text_goes_to_no_game(page, server):
    open_explorer(page, server.address)
    choose_greedily(page, N_TOKENS)
    page.select_option("[aria-label='Open a new stream']", "horizon")
    page.wait_for_selector(".tape")  # it is the active stream now
    read(page, PROMPT, then_write=True)
    wait_for(page, 3 + N_TOKENS)
    assert page.is_hidden(".targets")  # there is one stream to choose
    wait_for(page, 0, "B")


def test_the_key_is_asked_for_once_and_can_be_sent(page, server):
    """A key in the wrong layout of the keyboard is refused where it is typed; all requests wait for one dialog."""
    write_greedily(page, server)
    page.click(f"{pane()} button:has-text('Fork')")
    wait_for(page, 3 + N_TOKENS, "B")
    asked, sent = [], []

    def lock(route):
        key = route.request.headers.get("authorization")
        (sent if key == "Bearer right" else asked).append(key)
        if key == "Bearer right":
            route.continue_()
        else:
            refuse(route, 401, "invalid_api_key")

    page.route("**/v1/sessions/**", lock)
    page.reload()
    page.wait_for_selector("dialog input")
    while len(asked) < 2:
        page.wait_for_timeout(20)
    page.fill("dialog input", "ключ")
    page.click("dialog button")
    assert page.locator("dialog input").count() == 1
    page.fill("dialog input", "right")
    page.click("dialog button")
    for letter in "AB":
        wait_for(page, 3 + N_TOKENS, letter)
    assert asked == [None, None]
    assert sent


def test_a_page_that_may_store_nothing_works(page, server):
    page.add_init_script(NO_STORAGE)
    write_greedily(page, server)
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("v")  # a setting, which would be stored
    wait_until_drawn(page)
    assert page.inner_text(".gates h3") == "Phases"


NO_STORAGE = """
for (const name of ["sessionStorage", "localStorage", "indexedDB"]) {
    const get = () => { throw new DOMException("Access is denied for this document.", "SecurityError"); };
    Object.defineProperty(window, name, { get });
}
"""


def test_the_keyboard_reaches_everything(page, server):
    open_explorer(page, server.address)
    choose_greedily(page, 4)
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
    wait_for(page, 3 + 4)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("v")
    wait_until_drawn(page)
    assert page.inner_text(".gates h3") == "Phases"
    page.keyboard.press("g")
    wait_for(page, 3 + 8)
    page.keyboard.press("f")
    wait_for(page, 3 + 8, "B")
    page.keyboard.press("[")
    for key in ("ArrowLeft", "ArrowLeft", "Home"):
        page.keyboard.press(key)
    wait_until_drawn(page)
    assert page.locator(f"{pane('A')} .token.chosen").inner_text() == "the"
    page.keyboard.press("t")
    page.keyboard.press("t")
    wait_until_drawn(page)
    assert page.get_attribute("html", "data-theme") == "dark"


def test_pages_of_any_width_and_colour_can_be_read(page, server):
    """Nothing runs out of a phone's width, and text stands out from what is behind it, the most surprising too."""
    write_greedily(page, server)
    page.click(f"{pane()} .token >> nth=1")
    for width, scheme in itertools.product((360, 1440), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        wait_until_drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CONTRAST, [".word", ".status", ".caption", ".inspector p", "h2"]) >= 4.4


CONTRAST = """(selectors) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const draw = canvas.getContext("2d", { willReadFrequently: true });
    const light = ([r, g, b]) => {
        const part = (x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    const behind = (element) => {  // all backgrounds on top of each other
        const layers = [];
        for (let at = element; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
        draw.fillStyle = "white";
        draw.fillRect(0, 0, 1, 1);
        for (const layer of layers) { draw.fillStyle = layer; draw.fillRect(0, 0, 1, 1); }
        return light(draw.getImageData(0, 0, 1, 1).data);
    };
    const colour = (element) => {
        draw.fillStyle = getComputedStyle(element).color;
        draw.fillRect(0, 0, 1, 1);
        return light(draw.getImageData(0, 0, 1, 1).data);
    };
    const found = selectors.flatMap((selector) => [...document.querySelectorAll(selector)]);
    return Math.min(...found.map((element) => {
        const [low, high] = [behind(element), colour(element)].sort((one, other) => one - other);
        return (high + 0.05) / (low + 0.05);
    }));
}"""
