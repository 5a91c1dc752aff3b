import sys

from recurra.data.files import _MANY_ITEMS, _WORTH_A_BAR, progress


class Terminal:
    """A standard error that is a terminal and keeps what is written."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def written_to_a_terminal(monkeypatch, n_bytes):
    terminal = Terminal()
    # Here and not in a fixture: pytest puts its own standard error back between a fixture and the test.
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("Encoding train.txt", n_bytes, in_bytes=True) as advance:
        advance(n_bytes // 2)
    return terminal.text


def test_a_bar_on_a_terminal(monkeypatch):
    text = written_to_a_terminal(monkeypatch, 2 * 10**9)
    assert "Encoding train.txt" in text
    assert "1.0/2.0 GB" in text


def test_no_bar_for_a_small_file(monkeypatch):
    assert written_to_a_terminal(monkeypatch, _WORTH_A_BAR - 1) == ""


def test_no_bar_without_a_terminal(capsys):
    with progress("Encoding train.txt", 2**30, in_bytes=True) as advance:
        advance(2**29)
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_counts_items(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("Writing", _MANY_ITEMS - 1) as advance:
        advance(100)
    assert terminal.text == ""
    with progress("Writing", 2000) as advance:
        advance(700)
        advance(300)
    assert "Writing" in terminal.text
    assert "1000/2000" in terminal.text
