"""`recurra explore`: where the page is, and when it is opened. The page itself has tests in tests/web."""

import http.server
import socket
import threading
import urllib.request

import pytest

from recurra.cli import main
from recurra.cli.serve import _open_when_ready, _page_address


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


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:1"], ids=["no proxy", "a dead proxy"])
def test_the_page_is_opened_once_the_server_answers(monkeypatch, proxy):
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib reads the variables once in a process

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    opened: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert _open_when_ready(address, opened.append, seconds=60.0)
    assert opened == [address]


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["explore", "memory-horizon", "--no-browser", "--port", port]) == 2
    assert f"--port is {port}, which another program listens on; expected a free port" in capsys.readouterr().err
