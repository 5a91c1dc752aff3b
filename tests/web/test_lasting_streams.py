"""Streams on `recurra serve` outlive a reload, a refusal and the server; each belongs to one tab of the browser."""

import time

import pytest
from tests.web.conftest import PATIENCE
from tests.web.explorer import choose_greedily, open_explorer, pane, position, read, text, wait_for, wait_until_drawn
from tests.web.served import N_TOKENS, PROMPT, Server, close, continued, refuse, sessions, write_greedily

MOST_RELOADS = 20


def hold_while_it_writes(page, server: Server) -> str:
    """Open the page, let it write some tokens, hold the server in the middle, and give the session's name.

    The server works in short turns: on a busy machine it would be done before the page has drawn the first token.
    """
    answers = []
    page.on("response", lambda answer: answers.append(answer))
    open_explorer(page, server.address)
    choose_greedily(page, 10_000)
    server.hold()
    read(page, PROMPT, then_write=True)
    while position(page) < 30:
        server.let_go()
        time.sleep(0.02)
        server.hold()
        wait_until_drawn(page)
    (opened,) = (one for one in answers if one.request.method == "POST" and one.url.endswith("/v1/sessions"))
    return opened.json()["id"]


def test_a_killed_server_costs_nothing_that_was_shown(page, server, runs):
    """It dies while it writes. When it is back, the stream goes on from exactly what the page shows."""
    hold_while_it_writes(page, server)
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


def test_a_stopped_stream_stands_where_it_is_shown(page, server, runs):
    """The server writes on until it notices; what came after the last token that is shown is taken back."""
    name = hold_while_it_writes(page, server)
    page.click(f"{pane()} button.go")
    server.let_go()
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
    name = hold_while_it_writes(page, server)
    page.click(f"{pane()} button.close")
    server.let_go()
    while name in sessions(server):
        page.wait_for_timeout(200)  # each of these requests is work for a busy server
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert position(page) == 0


@pytest.fixture
def second_tab(page) -> object:
    """Another tab of the same browser."""
    opened = page.context.new_page()
    opened.set_default_timeout(PATIENCE)
    return opened


@pytest.mark.slow
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
    for _ in range(MOST_RELOADS):  # until the browser has let go what the closed tab had
        page.reload()
        page.wait_for_selector("html[data-ready]")
        wait_until_drawn(page)
        if page.locator("article.pane").count() == 2:
            break
    assert {text(page, letter) for letter in "AB"} == {whole, beside}
