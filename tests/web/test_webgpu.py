"""A folder exported with --webgpu: the page uses WebGPU where it can be had and agrees, and says what it uses.

The browser's GPU is SwiftShader, which computes on the processor and says so: the page uses it when asked to, or
where a test hides that.
"""

import json
import shutil
from pathlib import Path

import pytest
from tests.web.explorer import browsing, choose_greedily, open_explorer, read, text, wait_for

pytest.importorskip("onnx", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxscript", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("transformers", reason="needs the extra export: pip install recurra[export]")

from recurra import open_run
from recurra.cli import main
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream
from recurra.train.formats import engine_file

pytestmark = pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse

PROMPT, N_TOKENS = "the dog saw\n a cat", 12
GPU_IN_SOFTWARE = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
HIDES_THAT_IT_IS_SOFTWARE = "Object.defineProperty(GPUAdapterInfo.prototype, 'isFallbackAdapter', {get: () => false})"
HAS_ADAPTER = "async () => Boolean(navigator.gpu && (await navigator.gpu.requestAdapter()))"


@pytest.fixture(scope="module")
def browser():
    with browsing(*GPU_IN_SOFTWARE) as started:
        yield started


@pytest.fixture(scope="module")
def folder(runs, shared) -> Path:
    def export(folder: Path) -> None:
        assert main(["export", "web", str(runs / "bpe"), str(folder), "--weights", "float32", "--webgpu"]) == 0

    return shared("web-webgpu", export)


def written(page, runs) -> tuple[str, str]:
    """What the page writes after the prompt, and what Python does."""
    choose_greedily(page, N_TOKENS)
    read(page, PROMPT, then_write=True)
    run = open_run(runs / "bpe")
    stream = Stream(run.model, run.tokenizer)
    stream.feed(PROMPT)
    wait_for(page, stream.position + N_TOKENS)
    expected = "".join(stream.generate_text(N_TOKENS, sampling=SamplingConfig(temperature=0.0)))
    return text(page, which="written").strip(), expected.strip()


def used(page) -> str:
    return page.inner_text(".place")


def require_adapter(page, address: str) -> None:
    page.goto(f"{address}icon.svg")
    if not page.evaluate(HAS_ADAPTER):
        pytest.skip("needs a browser with a WebGPU adapter, SwiftShader's if no other")


@pytest.mark.parametrize("chosen", ["by the page", pytest.param("by the address", marks=pytest.mark.slow)])
def test_webgpu_writes_what_python_writes(chosen, runs, folder, page, static_host):
    address = static_host(folder)
    require_adapter(page, address)
    if chosen == "by the page":
        page.add_init_script(HIDES_THAT_IT_IS_SOFTWARE)
    open_explorer(page, address + ("" if chosen == "by the page" else "?provider=webgpu"))
    assert used(page) == "running in this page: WebGPU"
    ours, expected = written(page, runs)
    assert ours == expected


@pytest.mark.slow
def test_logits_that_differ_are_not_used(folder, tmp_path, page, static_host):
    changed = shutil.copytree(folder, tmp_path / "changed")
    address = static_host(changed)
    require_adapter(page, address)
    page.add_init_script(HIDES_THAT_IT_IS_SOFTWARE)
    described = json.loads((changed / "engine.json").read_text())
    described["models"][0]["tolerance"] = -1
    (changed / "engine.json").write_bytes(engine_file(described))
    open_explorer(page, address)
    assert "WebAssembly, 1 thread (no WebGPU: its logits of bpe differ by" in used(page)


GONE = "Object.defineProperty(Navigator.prototype, 'gpu', {get: () => undefined})"
SOFTWARE = """Object.defineProperty(Navigator.prototype, 'gpu', {
    get: () => ({requestAdapter: async () => ({info: {isFallbackAdapter: true}})})
})"""


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        pytest.param(GONE, "this browser has no WebGPU", marks=pytest.mark.slow, id="none"),
        pytest.param(SOFTWARE, "this browser has only a software adapter, slower than WebAssembly", id="software"),
    ],
)
def test_webassembly_is_used_without_a_gpu(gpu, reason, runs, folder, page, static_host):
    page.add_init_script(gpu)
    open_explorer(page, static_host(folder))
    assert used(page) == f"running in this page: WebAssembly, 1 thread (no WebGPU: {reason})"
    ours, expected = written(page, runs)
    assert ours == expected


@pytest.mark.parametrize(
    ("gpu", "provider", "reason"),
    [
        (GONE, "webgpu", "WebGPU cannot be used: this browser has no WebGPU"),
        ("", "cuda", "provider is cuda; expected wasm or webgpu"),
    ],
    ids=["none", "unknown"],
)
def test_what_was_asked_for_is_not_replaced(gpu, provider, reason, folder, page, static_host):
    page.add_init_script(gpu)
    page.goto(f"{static_host(folder)}?provider={provider}")
    page.wait_for_selector(".broken")
    assert reason in page.inner_text(".broken")
