import io

from recurra.data._files import _WORTH_A_BAR, progress


def written(monkeypatch, n_bytes, is_terminal=True):
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    # Here and not in a fixture: pytest puts its own standard error back between a fixture and the test.
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress("Encoding train.txt", n_bytes, in_bytes=True) as advance:
        advance(n_bytes // 2)
    return stderr.getvalue()


def test_a_bar_for_long_work_on_a_terminal(monkeypatch):
    text = written(monkeypatch, 2 * 10**9)
    assert "Encoding train.txt" in text
    assert "1.0/2.0 GB" in text
    assert written(monkeypatch, _WORTH_A_BAR - 1) == ""
    assert written(monkeypatch, 2**30, is_terminal=False) == ""
