"""`recurra explore`: where the page is, and when it is opened. The page itself has tests in tests/web."""

import queue
import socket

import pytest

from recurra.cli import main
from recurra.cli.serve import _page_address


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("127.0.0.1", 8000, "http://127.0.0.1:8000/"),
        ("0.0.0.0", 80, "http://127.0.0.1:80/"),
        ("::1", 8000, "http://[::1]:8000/"),
    ],
)
def test_the_address_is_one_that_this_machine_reaches(host, port, address):
    assert _page_address(host, port) == address


def test_a_folder_without_a_run_is_refused_before_the_address_is_said(capsys, tmp_path):
    assert main(["explore", str(tmp_path), "--no-browser"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "has no config.yaml; expected the folder of a run" in captured.err


def test_the_page_is_opened_once_the_server_is_ready(monkeypatch):
    opened: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr("webbrowser.open", opened.put)
    monkeypatch.setattr("recurra.cli.serve.serve_runs", lambda *given: given[-1]() or 0)
    assert main(["explore", "memory-horizon", "--port", "8123"]) == 0
    assert opened.get(timeout=20) == "http://127.0.0.1:8123/"


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["explore", "memory-horizon", "--no-browser", "--port", port]) == 2
    assert f"--port is {port}, which another program listens on; expected a free port" in capsys.readouterr().err
