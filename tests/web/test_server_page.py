"""The explorer on `recurra serve`, in a browser: text by surprise, gates, forks, games, keys and colours."""

import math
import re

import pytest
import torch
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
from tests.web.served import N_TOKENS, PROMPT, continued, refuse, stream_of, write_greedily

from recurra import open_run
from recurra.data.memory_horizon import memory_horizon_targets


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
    assert page.locator(".memory text:not(.of-bytes)").all_text_contents() == ["0", "10", "20", "tokens"]


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
    before = position(page, "C")
    read(page, "日本")  # whose tokens are bytes
    n_tokens = len(stream_of(runs, "bpe").encode("日本"))
    wait_for(page, before + n_tokens, "C")
    shown = page.locator(f"{pane('C')} .token:visible").all_text_contents()
    assert "".join(shown).endswith("日本")
    assert n_tokens > 2
    assert shown[-1] == "本"
    page.focus(f"{pane('C')} .transcript")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    wait_until_drawn(page)
    assert page.locator(f"{pane('C')} .token.chosen").inner_text() == "本"
    part = page.inner_text(f"{pane('C')} .inspector strong")
    assert re.fullmatch(r"本, part \d of \d", part)
    assert page.inner_text(f"{pane('C')} .inspector").startswith(f"{part}, ")
    assert page.inner_text(f"{pane('C')} .gates .caption").startswith(f"“{part}”: mean")


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


def test_the_game_against_a_model_on_the_server(page, server, runs):
    open_explorer(page, server.address)
    choose_greedily(page, 4)
    example = page.inner_text(".example >> nth=0")
    page.click(".example >> nth=0")
    wait_for(page, len(stream_of(runs, "words").encode(example)) + 4)
    assert text(page, which="read").strip() == example
    page.select_option("[aria-label='Open a new stream']", "horizon")
    played = [1, 2, 3, 4, 5, 1, 4]
    page.click(f"{pane('B')} .example >> nth=0")
    wait_for(page, 4, "B")
    page.focus(".tape")
    for number, token in enumerate(played[4:], 5):
        page.keyboard.press("r" if token == 5 else str(token))
        wait_for(page, number, "B")
    with torch.no_grad():
        answers = open_run(runs / "horizon").model(torch.tensor([played]))[0][0].argmax(-1).tolist()
    targets = memory_horizon_targets(torch.tensor([played]), modulus=7)[0].tolist()
    assert page.locator(".cell .answer").all_text_contents() == list(map(str, answers))
    n_right = sum(answer == target for answer, target in zip(answers, targets))
    assert page.inner_text(".score").startswith(f"{n_right} of {len(played)} answers correct")


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
