"""Markup and scripts in the names of models, in their words, in prompts and in errors: the page shows them as text."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web.conftest import TEXT
from tests.web.explorer import choose_greedily, open_explorer, pane, read, text, wait_for, wait_until_drawn

from recurra.cli import main
from recurra.train.formats import engine_file

WORDS = (
    "<img/src=x/onerror=window.hacked=1>",
    "</span><script>window.hacked=1</script>",
    '"><svg/onload=window.hacked=1>',
    "'onclick='window.hacked=1",
    "<iframe/srcdoc=&lt;script&gt;parent.hacked=1&lt;/script&gt;>",
    "javascript:window.hacked=1",
    "${window.hacked=1}",
    "&lt;b&gt;",
    "\u202egnp.exe\u2066",
    "\x07\x1b[31m\x00",
    "x" * 3000,
)
NAMES = ("<img src=x onerror=window.hacked=1>", '"><svg onload=window.hacked=1>')
N_TOKENS = 12
NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""
ADDED = """() => [...document.querySelectorAll("*")]
    .filter((one) => one.matches("img, iframe, object, embed, base, a, script:not([src])")
        || [...one.attributes].some(({ name, value }) => /^on|^src/.test(name) && !value.startsWith("app.js")))
    .map((one) => one.outerHTML)"""
TRY_SCRIPTS = """async () => {
    const script = document.createElement("script");
    script.textContent = "window.hacked = 2";
    document.body.append(script);
    document.body.insertAdjacentHTML("beforeend", "<img src='data:,' onerror='window.hacked = 3'>");
    setTimeout("window.hacked = 4");
    await new Promise((done) => setTimeout(done, 50));
    return violations;
}"""


@pytest.fixture(scope="module")
def hostile(shared) -> Path:
    """A folder with two runs of a model whose words and names are markup."""

    def train(folder: Path) -> None:
        for split in ("train", "valid", "test"):
            lines = [" ".join((*WORDS, *reversed(WORDS)))] * 4
            (folder / f"{split}.txt").write_text("\n".join(lines), encoding="utf-8")
        recipe = folder / "recipe.yaml"
        recipe.write_text(TEXT.format(path=folder, vocabulary="vocabulary: words"), encoding="utf-8")
        assert main(["train", str(recipe), "--run-dir", str(folder / NAMES[0]), "--training.epochs", "1"]) == 0
        shutil.copytree(folder / NAMES[0], folder / NAMES[1])

    return shared("web-hostile", train)


@pytest.fixture(scope="module")
def address(hostile) -> Iterator[str]:
    """A server of both runs, in a thread."""
    for package in ("fastapi", "uvicorn", "sse_starlette"):
        pytest.importorskip(package, reason="needs the extra serve: pip install recurra[serve]")
    from tests.serve.conftest import Running

    from recurra.serve._app import _load_model
    from recurra.serve._http import ServeSettings
    from recurra.serve._service import Service

    models = [_load_model(str(hostile / name), None, "best", ()) for name in NAMES]
    with Running(Service(models, ServeSettings(), threads=1)) as running:
        yield f"{running.url}/"


def require_harmless(page) -> None:
    assert page.evaluate("window.hacked ?? null") is None
    assert page.evaluate(ADDED) == []
    assert page.evaluate("violations") == []


def visit(page, address: str) -> None:
    """Open a page of models with the two names, use every part of it, and see the texts as they are."""
    page.add_init_script(NOTE_VIOLATIONS)
    open_explorer(page, address)
    assert page.inner_text(f"{pane()} h2").startswith(NAMES[0])
    choose_greedily(page, N_TOKENS)
    prompt = " ".join(WORDS)
    read(page, prompt, then_write=True)
    wait_for(page, len(WORDS) + N_TOKENS)
    assert text(page, which="read").split(" ") == list(WORDS)
    assert set(text(page, which="written").split()) <= {*WORDS, "<unk>", "<eos>"}
    for number, word in enumerate(WORDS):
        page.click(f"{pane()} .token >> nth={number}")
        wait_until_drawn(page)
        assert page.text_content(".inspector strong") == word
        require_harmless(page)
    assert set(page.locator(".expected .name").all_text_contents()) & set(WORDS)
    page.click("text=Fork after this token")
    wait_for(page, len(WORDS), "B")
    page.click(f"{pane('B')} button:has-text('Fork')")
    wait_for(page, len(WORDS), "C")
    page.select_option(f"{pane('B')} select.compare", NAMES[1])  # it reads the text so far
    page.wait_for_selector(f"{pane('D')}[data-status=ready]")
    assert page.inner_text(f"{pane('D')} h2").startswith(NAMES[1])
    page.select_option("[aria-label='Open a new stream']", NAMES[1])
    page.wait_for_selector(f"{pane('E')}[data-status=ready]")
    for letter in "ED":
        page.click(f"{pane(letter)} button.close")
    for key in ("Escape", "v", "t", "?"):
        page.keyboard.press(key)
    page.click("dialog button")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    wait_for(page, len(WORDS) + N_TOKENS)
    assert text(page, which="read").split(" ") == list(WORDS)
    require_harmless(page)


def require_no_script_runs(page) -> None:
    """Were markup ever to become elements, the page's policy would still keep its scripts from running."""
    violations = page.evaluate(TRY_SCRIPTS)
    assert {"script-src-elem", "script-src-attr", "script-src"} <= set(violations)
    assert page.evaluate("window.hacked ?? null") is None


def test_a_server_page_shows_markup_as_text(page, address):
    visit(page, address)
    message = f"refused: {WORDS[0]}"
    page.route("**/fork", lambda route: route.fulfill(status=400, json={"error": {"message": message, "code": "x"}}))
    page.route("**/v1/sessions", lambda route: route.fulfill(status=400, json={"error": {"message": message}}))
    page.click(f"{pane()} button:has-text('Fork')")
    page.wait_for_selector(".notice:visible")
    assert page.text_content(".notice") == message
    require_harmless(page)
    require_no_script_runs(page)


@pytest.mark.slow
@pytest.mark.compile  # torch.export makes symbols of sizes, which the shape checks refuse
def test_a_static_page_shows_markup_as_text(page, hostile, shared, static_host):
    for package in ("onnx", "onnxscript", "onnxruntime", "transformers"):
        pytest.importorskip(package, reason="needs the extra export: pip install recurra[export]")

    def export(folder: Path) -> None:
        assert main(["export", "web", str(hostile / NAMES[0]), str(folder)]) == 0
        manifest = json.loads((folder / "engine.json").read_text())
        manifest["models"].append(manifest["models"][0] | {"name": NAMES[1]})
        (folder / "engine.json").write_bytes(engine_file(manifest))

    folder = shared("web-hostile-page", export)
    visit(page, static_host(folder))
    require_no_script_runs(page)


@pytest.mark.parametrize("name", [*NAMES, WORDS[1], "../x", "a\u202eb"])
def test_a_session_is_not_named_by_markup(address, name):
    asked = urllib.request.Request(
        f"{address}v1/sessions", json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=30)
    assert (refused.value.code, refused.value.headers["Content-Type"]) == (400, "application/json")
    refused.value.close()
