"""`recurra serve`: from a trained run to a server that ends at a signal."""

import json
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from tests.processes import Program

from recurra import open_run
from recurra.cli import _parsers, main
from recurra.cli.serve import _settings
from recurra.serve._app import _loaded, _threads_of_model
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

RECIPE = """
experiment: text
data: {path: corpus, batch_size: 2, segment_length: 4, vocabulary: words}
model: {n_layer: 1, d_model: 8, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}}
training: {epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "corpus").mkdir()
    for split in ("train", "valid", "test"):
        text = "the company said sales rose\nthe court said the market rose\n"
        (folder / "corpus" / f"{split}.txt").write_text(text)
    (folder / "recipe.yaml").write_text(RECIPE)
    words = ["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "tiny")]
    assert main([*words, "--data.path", str(folder / "corpus")]) == 0
    (folder / "tiny" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    return folder / "tiny"


def test_a_run_is_served_logged_and_kept_until_a_signal(run, tmp_path):
    words = ["serve", str(run), "--port", "0", "--weights", "model", "--threads", "1", "--log-file", "log.jsonl"]
    code = "import sys; from recurra.cli import main, serve; run = serve.serve_runs; said = lambda: print('ready')\n"
    code += f"serve.serve_runs = lambda *given: run(*given, said); sys.exit(main({words!r}))"
    program = Program(code, tmp_path)
    while not (said := re.search(r"serving tiny at (http\S+)", program._written[1].read_text())):
        assert program._process.is_alive(), program.wait().said
        time.sleep(0.01)
    url = said[1]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20) as api:
        answer = api.completions.create(model="tiny", prompt="the company", max_tokens=3, temperature=0)
        chat = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the court"}], max_tokens=2
        )
    assert chat.choices[0].finish_reason == "length"
    with httpx.Client(base_url=url, verify=False) as client:
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        client.post("/v1/sessions/a/feed", json={"text": "the market"}).raise_for_status()
    program.send(signal.SIGTERM)
    ended = program.wait()
    assert "Traceback" not in ended.said
    assert ended.stdout == "ready\n"
    trained = open_run(run)
    stream = Stream(trained.model, trained.tokenizer)
    stream.feed("the company")
    assert answer.choices[0].text == "".join(stream.generate_text(3, sampling=SamplingConfig(temperature=0.0)))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"route": "/v1/completions", "status": 200}.items() <= next(x for x in lines if "route" in x).items()
    assert (run / "sessions.sqlite").exists()


def test_what_cannot_be_served_is_said_in_plain_words(run, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RECURRA_API_KEY", raising=False)
    for words, said in (
        ([str(run), "--host", "0.0.0.0"], "without an API key"),
        ([str(run), str(run), "--weights", "model"], "folders with distinct names"),
        ([str(tmp_path / "none")], "the folder of a run"),
    ):
        assert main(["serve", *words]) == 2
        assert said in capsys.readouterr().err


def test_keys_come_from_a_file_and_the_environment(run, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("first-key-0123\nsecond-key-0123\n")
    monkeypatch.setenv("RECURRA_API_KEY", "third-key-0123")
    words = [str(run), "--api-key-file", str(tmp_path / "keys"), "--host", "0.0.0.0", "--prefix-cache-bytes", "7"]
    words += ["--max-connections", "99", "--header-seconds", "2.5", "--body-seconds", "5"]
    made = _settings(_parsers.serve(words))
    assert made.prefix_cache_bytes == 7
    assert (made.max_connections, made.header_seconds, made.body_seconds) == (99, 2.5, 5)
    assert made.api_keys == ("third-key-0123", "first-key-0123", "second-key-0123")
    assert made.sessions_file == run / "sessions.sqlite"


@pytest.mark.parametrize(
    ("content", "said"),
    [("\n \n", "which has no key"), ("abcdefgh0123 a-server\n", "with a line that contains spaces")],
)
def test_a_file_of_keys_that_has_none_or_more_on_a_line_is_refused(run, tmp_path, content, said):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ValueError, match=rf"^--api-key-file is .*, {said}; expected"):
        _settings(_parsers.serve([str(run), "--api-key-file", str(tmp_path / "keys")]))


def test_models_are_loaded_in_a_thread_that_has_ended(models):
    """Its pool of OpenMP threads would slow the engine's down."""
    loading = []

    def load():
        loading.append(threading.current_thread())
        return models[:1]

    assert _loaded(load) == models[:1]
    assert loading[0] is not threading.current_thread()
    assert not loading[0].is_alive()


@pytest.mark.parametrize(("given", "cores", "used"), [(None, 8, 7), (None, 1, 1), (3, 8, 3)])
def test_a_core_is_left_to_http_unless_threads_are_given(monkeypatch, given, cores, used):
    monkeypatch.setattr("torch.get_num_threads", lambda: cores)
    assert _threads_of_model(given) == used


def test_an_error_of_loading_is_raised_where_the_server_starts():
    def load():
        raise ValueError("run is a file; expected a folder")

    with pytest.raises(ValueError, match=r"^run is a file; expected a folder$"):
        _loaded(load)
