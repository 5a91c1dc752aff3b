"""`recurra export web`: a folder in, a page out that computes in the browser what Python computes."""

import json
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tests.web.explorer import choose_greedily, open_explorer, pane, read, text, wait_for

pytest.importorskip("onnx", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxscript", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("transformers", reason="needs the extra export: pip install recurra[export]")

from recurra import open_run
from recurra.cli import main
from recurra.data.memory_horizon import memory_horizon_targets
from recurra.decoding.packing import pack_linear_layers
from recurra.serve._model import first_tokens
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

pytestmark = pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse

PROMPT = "the dog saw\n a naïve cat ran away"
N_TOKENS = 40
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "export.md"
NO_TIME_BETWEEN_MESSAGES = """
let time = 0;
performance.now = () => (time += 1000);
"""


@pytest.fixture(scope="module")
def texts(runs, shared) -> Path:
    """Two models in one folder, bpe and words, each with its own tokenizer; int8."""

    def export(folder: Path) -> None:
        assert main(["export", "web", str(runs / "bpe"), str(runs / "words"), str(folder)]) == 0

    return shared("web-texts", export)


@pytest.fixture(scope="module")
def game(runs, shared) -> Path:
    """The model of memory horizon, int8."""

    def export(folder: Path) -> None:
        assert main(["export", "web", str(runs / "horizon"), str(folder)]) == 0

    return shared("web-game", export)


def stream_of(runs: Path, name: str) -> Stream:
    run = open_run(runs / name)
    return Stream(pack_linear_layers(run.model, "int8"), run.tokenizer)


def generated(capsys, run: Path) -> str:
    capsys.readouterr()
    words = ["generate", str(run), "--prompt", PROMPT, "--temperature", "0", "--max-tokens", str(N_TOKENS)]
    assert main([*words, "--weights", "int8"]) == 0
    return capsys.readouterr().out


def n_read(runs: Path, name: str) -> int:
    """Tokens of the prompt."""
    return len(open_run(runs / name).tokenizer.encode(PROMPT))


def page_says(page, address: str, n_read: int) -> str:
    """What the page writes after the prompt of so many tokens, with the line feed that a command ends with."""
    open_explorer(page, address)
    choose_greedily(page, N_TOKENS)
    read(page, PROMPT, then_write=True)
    wait_for(page, n_read + N_TOKENS)
    said = text(page, which="written")
    return said if said.endswith("\n") else said + "\n"


def test_a_stream_goes_on_as_generate_does_is_found_again_and_forked(runs, texts, capsys, page, static_host):
    """One page: the state is kept over a reload, and a fork in the middle writes what the stream wrote."""
    read_tokens = n_read(runs, "bpe")
    whole = page_says(page, static_host(texts), read_tokens)
    assert whole == generated(capsys, runs / "bpe")
    n_bytes = [model["state_bytes"] for model in json.loads((texts / "engine.json").read_text())["models"]]
    assert n_bytes == [16 * 8] * 2  # a layer of 16 complex channels
    assert page.inner_text(".of-state dd") == f"{n_bytes[0]} B"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    wait_for(page, read_tokens + N_TOKENS)
    assert text(page, which="written").rstrip("\n") == whole.rstrip("\n")
    page.focus(f"{pane()} .transcript")
    for _ in range(N_TOKENS + 1):  # from the end to the last token of the prompt
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("f")
    wait_for(page, read_tokens, "B")
    page.click(f"{pane('B')} button.go")
    wait_for(page, read_tokens + N_TOKENS, "B")
    assert text(page, "B") == text(page, "A")
    page.click(f"{pane('A')} button.go")  # and both go on
    page.click(f"{pane('B')} button.go")
    wait_for(page, read_tokens + 2 * N_TOKENS, "A")
    wait_for(page, read_tokens + 2 * N_TOKENS, "B")
    assert text(page, "B") == text(page, "A")


PLAYED_WITH_THE_MODULE = """async (played) => {
    const { load } = await import("./recurra.js");
    const stream = (await load()).stream();
    const read = await stream.feed(played);
    return [read.map(({ answers }) => answers[0].id), await stream.generate(1).next().catch((error) => error.message)];
}"""


def test_the_game_answers_as_the_model_does(runs, game, page, static_host):
    open_explorer(page, static_host(game))
    played = [2, 3, 4, 5, 1, 0, 4, 4, 5, 3]
    page.focus(".tape")
    for number, token in enumerate(played, 1):
        page.keyboard.press("r" if token == 5 else str(token))
        wait_for(page, number)  # one at a time, as somebody plays
    with torch.no_grad():
        model = pack_linear_layers(open_run(runs / "horizon").model, "int8")
        answers = model(torch.tensor([played]))[0][0].argmax(-1).tolist()
    targets = memory_horizon_targets(torch.tensor([played]), modulus=7)[0].tolist()
    assert page.locator(".cell .answer").all_text_contents() == list(map(str, answers))
    said, refusal = page.evaluate(PLAYED_WITH_THE_MODULE, played)
    assert said == answers
    assert "the model is horizon; expected one of text" in refusal
    shown = page.locator(".cell .truth").all_text_contents()
    assert shown == ["✓" if answer == target else str(target) for answer, target in zip(answers, targets)]


def hastened(folder: Path, copy: Path) -> Path:
    """A copy whose worker has another clock, and whose page takes that worker."""
    shutil.copytree(folder, copy)
    worker, app, index = (copy / name for name in ("worker.js", "app.js", "index.html"))
    before = worker.read_bytes()
    worker.write_bytes(NO_TIME_BETWEEN_MESSAGES.encode() + before)
    digests = (sha256(content).hexdigest().encode() for content in (before, worker.read_bytes()))
    app.write_bytes(app.read_bytes().replace(*digests))
    index.write_text(re.sub(' integrity="[^"]*"', "", index.read_text(encoding="utf-8")), encoding="utf-8")
    return copy


USE_OF_THE_MODULE = """async ([prompt, n]) => {
    const { load } = await import("/FOLDER/recurra.js");
    const ids = async (tokens) => {
        const found = [];
        for await (const { id } of tokens) found.push(id);
        return found;
    };
    const refusal = (promise) => promise.then(() => null, (error) => error.message);
    const greedy = { temperature: 0 };
    const model = await load("FOLDER", { name: "words" });
    const [stream, empty] = [model.stream(), model.stream()];
    const read = await stream.feed(prompt);
    const [twin, other] = [stream.fork(), stream.fork()];
    const [logits, probabilities] = [await stream.logits(), await stream.probabilities()];
    const [left, busy] = [[], []];
    for await (const { id } of other.generate(10000, greedy)) { // the worker is ahead when the loop ends
        if (!left.length) for (const use of ["feed", "logits", "close"]) busy.push(await refusal(other[use]([id])));
        if (left.push(id) === 5) break;
    }
    const example = (await load()).stream();
    await example.feed("The");
    let said = "The";
    for await (const { text } of example.generate(50, { temperature: 0.8, topP: 0.9, seed: 1 })) said += text;
    const drawn = (count, sampling) => ids(twin.fork(read.length).generate(count, sampling));
    return {
        model: [model.name, model.weights, model.stateBytes],
        read: read.map(({ id, logprob }) => [id, logprob]),
        logits: [...logits], probabilities: [...probabilities],
        written: await ids(stream.generate(n, greedy)), tokens: stream.tokens,
        twin: await ids(twin.generate(n, { topK: 1 })),
        left: left.concat(await ids(other.generate(n - 5, greedy))), busy,
        earlier: await ids(stream.fork(read.length + 3).generate(n - 3, greedy)),
        drawn: await Promise.all([3, 3, 4].map((seed) => drawn(n, { seed }))),
        ofTwo: await Promise.all([...Array(16).keys()].map((seed) => drawn(1, { seed, topK: 2, temperature: 1000 }))),
        refusals: await Promise.all([
            load("FOLDER", { name: "none" }), load("nowhere"), twin.feed([-1]), (async () => twin.fork(-1))(),
            ...[{ temperature: NaN }, { topK: 0 }, { topP: 2 }, { seed: 2 ** 32 }].map((wrong) => drawn(1, wrong)),
            drawn(0.5, {}),
        ].map(refusal)),
        nothing: await empty.logits(), begun: (await ids(empty.generate(1, greedy))) && empty.tokens, said,
        // `page` fails at its end for errors that nobody catches, such as those of the last fork
        lost: [await empty.close(), await refusal(empty.fork().logits()), empty.fork()][1],
        here: (history.replaceState(null, "", "FOLDER/?x#y"), (await load("")).name),
    };
}"""


def test_the_module_reads_generates_and_forks_in_another_page(runs, texts, tmp_path, page, static_host):
    """The page is the guide's example; what it writes with its seed, the module writes again."""
    (example,) = re.findall(r"```html\n(<!doctype.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "index.html").write_text(example, encoding="utf-8")
    (tmp_path / "FOLDER").symlink_to(texts)
    page.goto(static_host(tmp_path))
    found = page.evaluate(USE_OF_THE_MODULE, [PROMPT, 12])

    stream = stream_of(runs, "words")
    read, logits = stream.encode(PROMPT).tolist(), stream.feed(PROMPT)
    written = list(stream.generate(12, sampling=SamplingConfig(temperature=0.0)))
    assert found["model"] == ["words", "int8", 16 * 8]
    assert [token for token, _ in found["read"]] == read
    assert [logprob is None for _, logprob in found["read"]] == [True] + [False] * (len(read) - 1)
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=5e-2 * float(logits.abs().max()))
    torch.testing.assert_close(torch.tensor(found["probabilities"]), torch.tensor(found["logits"]).softmax(-1))
    assert found["tokens"] == read + written
    assert found["written"] == found["twin"] == found["left"] == written
    assert found["earlier"] == written[3:]
    first, again, other = found["drawn"]
    assert first == again != other
    assert {token for (token,) in found["ofTwo"]} == set(torch.tensor(found["logits"]).topk(2).indices.tolist())
    assert ["the stream is busy; expected one at rest" in said for said in found["busy"]] == [True] * 3
    assert "is closed" in found["lost"]
    assert found["here"] == "bpe"
    refusals = (
        "name is none; expected one of bpe, words",
        "/nowhere/engine.json is missing (404)",
        "a token is -1",
        "position is -1",
        "temperature is NaN",
        "topK is 0",
        "topP is 2",
        "seed is 4294967296",
        "n is 0.5",
    )
    assert all(part in said for part, said in zip(refusals, found["refusals"], strict=True))
    assert found["nothing"] is None
    start = first_tokens(stream.tokenizer)
    assert found["begun"] == [*start, int(stream_of(runs, "words").feed(start).argmax())]
    page.click("#go")
    page.wait_for_function("(said) => document.querySelector('#text').textContent === said", arg=found["said"])


@pytest.mark.slow  # tests/web/test_server_page.py does it on a server
def test_two_models_go_on_side_by_side(runs, texts, tmp_path, page, static_host):
    """One folder, two models with tokenizers of their own: each writes what its run writes.

    The worker's clock runs so fast that each stream lets messages in after every step, while the other one does.
    """

    names = ("bpe", "words")
    models = json.loads((texts / "engine.json").read_text())["models"]
    assert [model["name"] for model in models] == ["bpe", "words"]
    assert len({model[key] for model in models for key in ("file", "tokenizer")}) == 4
    page_says(page, static_host(hastened(texts, tmp_path / "site")), n_read(runs, "bpe"))
    page.select_option(f"{pane()} select.compare", "words")  # it reads the text so far
    page.wait_for_selector(f"{pane('B')}[data-status=ready]")
    said = text(page)
    streams = {letter: stream_of(runs, name) for letter, name in zip("AB", names)}
    streams["A"].feed(PROMPT)
    list(streams["A"].generate_text(N_TOKENS, sampling=SamplingConfig(temperature=0.0)))
    for token in streams["B"].encode(said).tolist():
        streams["B"].feed([token])  # one after the other, as the page does
    for letter, stream in streams.items():
        wait_for(page, stream.position, letter)
    shown = {"A": said, "B": said.replace("\n ", "\n")}  # words do not keep a blank at the start of a line
    assert text(page, "B") == shown["B"]
    page.evaluate("document.querySelectorAll('button.go').forEach((button) => button.click())")
    for letter, stream in streams.items():
        wait_for(page, stream.position + N_TOKENS, letter)
        expected = "".join(stream.generate_text(N_TOKENS, sampling=SamplingConfig(temperature=0.0)))
        assert (text(page, letter) + "\n").startswith((shown[letter] + expected).rstrip("\n"))
    page.reload()  # each stream is found again with its own model
    page.wait_for_selector("html[data-ready]")
    for letter, stream in streams.items():
        wait_for(page, stream.position, letter)


def copied(folder: Path, copy: Path, *, days: int = 0) -> Path:
    """An exported folder as it was put onto a host so many days ago, over what is there."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    for file in copy.iterdir():
        time = file.stat().st_atime - 86400 * days
        os.utime(file, (time, time))
    return copy


def test_a_new_export_is_what_the_next_visit_shows(texts, game, tmp_path, page, static_host):
    """A host that sends only Last-Modified, as most do: browsers then keep files for a tenth of their age."""
    folder = copied(texts, tmp_path / "site", days=10)
    address = static_host(folder)
    open_explorer(page, address)
    assert page.inner_text("h2").startswith("bpe")
    copied(game, folder)
    page.reload()
    page.wait_for_selector("html[data-ready], .broken")
    assert page.inner_text("h2").startswith("horizon")


def flipped(data: bytes) -> bytes:
    """Data with another bit in its middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = [
    ("engine.json", lambda data: data[: len(data) // 2]),
    ("engine.json", lambda data: data.replace(b'"local"', b'"lokal"')),
    ("engine.json", lambda data: data.replace(b'"n_layer": 1', b'"n_layer": 7')),
    ("model.onnx", flipped),
    ("tokenizer.json", flipped),
    ("worker.js", flipped),
    ("ort-wasm-simd-threaded.mjs", flipped),
    ("ort-wasm-simd-threaded.wasm", flipped),
]


def test_a_damaged_file_is_named_and_nothing_computed(texts, tmp_path, page, static_host):
    folder = copied(texts, tmp_path / "site")
    for name, damage in DAMAGES:
        sound = (folder / name).read_bytes()
        (folder / name).write_bytes(damage(sound))
        page.goto(static_host(folder))  # another address each time, of which the browser has nothing yet
        page.wait_for_selector(".broken")
        assert f"{name} is damaged; export the run again" in page.inner_text(".broken")
        (folder / name).write_bytes(sound)
    (folder / "app.js").write_bytes(flipped((folder / "app.js").read_bytes()))
    page.goto(static_host(folder))  # what cannot start cannot say so
    assert not page.is_visible(".late")
    page.evaluate("document.getAnimations().forEach((animation) => animation.finish())")
    assert "a file of this page is damaged or missing" in page.inner_text(".late")
    assert not page.query_selector("html[data-ready]")


def test_what_cannot_be_exported_is_refused(runs, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["export", "web", str(runs / "words"), str(tmp_path)]) == 2
    assert "which is not empty; expected another name: --force overwrites it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["export", "web", str(runs / "words"), str(tmp_path / "mine"), "--force"]) == 2
    assert "which is a file; expected the name of a folder" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "mine").read_text() == "mine"
    assert main(["export", "web", str(runs / "words"), str(runs / "words"), str(tmp_path / "both")]) == 2
    assert "expected folders with distinct names" in capsys.readouterr().err


def test_a_run_is_never_written_over(runs, capsys):
    """The last argument, forgotten, makes a run the target; the page's tokenizer has the name of its vocabulary."""
    before = (runs / "bpe" / "tokenizer.json").read_bytes()
    assert main(["export", "web", str(runs / "words"), str(runs / "bpe"), "--force"]) == 2
    assert "which contains a run; expected another name: a run is never overwritten" in capsys.readouterr().err
    assert (runs / "bpe" / "tokenizer.json").read_bytes() == before
