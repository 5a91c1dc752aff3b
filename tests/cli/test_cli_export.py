"""`recurra export`: a run in the form of other programs."""

from types import SimpleNamespace

import pytest
import torch
from tests.cli.conftest import train_on_text

pytest.importorskip("transformers", reason="needs the extra hf: pip install recurra[hf]")

from transformers import AutoModelForCausalLM, AutoTokenizer

from recurra import open_run
from recurra.cli import main
from recurra.convert import from_huggingface
from recurra.train.tasks.text import start_language_model

RUNS = {
    "words": (
        "text",
        "vocabulary: words",
        "{n_layer: 1, d_model: 8, tie_embeddings: true, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}}",
    ),
    "bpe": (
        "text-crt",
        "vocabulary: bpe, bpe_vocab_size: 264",
        "{n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8, cutoffs: [9, 90]}",
    ),
    "mamba": (
        "text",
        "vocabulary: bpe, bpe_vocab_size: 264",
        "{n_layer: 1, d_model: 32, d_channel_mixing: 0, mixer: mamba, norm: rms, biases: false}",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """The folders of finished runs by name."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: train_on_text(folder, name, *run) for name, run in RUNS.items()}


@pytest.fixture
def run(runs) -> str:
    return runs["words"]


@pytest.mark.parametrize("name", RUNS)
def test_transformers_loads_what_was_exported(name, runs, tmp_path, capsys):
    run = runs[name]
    capsys.readouterr()
    assert main(["export", "hf", run, str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "the logits of both differ by 0.0e+00 at most" in printed.out
    assert printed.err.startswith("exporting and comparing")
    assert printed.err.count("\n") == 1
    files = ("config", "generation_config", "tokenizer", "tokenizer_config", "manifest")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{name}.json" for name in files} | {
        "model.safetensors"
    }
    trained = open_run(run)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = "the dog saw\na naïve bird\n"
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == trained.tokenizer.encode(text).tolist()
    torch.testing.assert_close(model(tokens).logits, trained.model(tokens)[0], atol=1e-6, rtol=0)
    # without a prompt a text begins as a line does, as in `recurra generate`
    assert model.generation_config.bos_token_id == trained.tokenizer.encode("\n").item()
    capsys.readouterr()
    assert main(["generate", run, "--temperature", "0", "--max-tokens", "7"]) == 0
    generated = model.generate(max_new_tokens=7, do_sample=False)[0, 1:]
    assert capsys.readouterr().out.strip() == tokenizer.decode(generated).strip()


def test_a_file_for_llama_cpp_has_the_text_of_the_run(runs, tmp_path, capsys):
    pytest.importorskip("gguf", reason="needs the extra hf: pip install recurra[hf]")
    run, file, back = runs["mamba"], str(tmp_path / "model.gguf"), str(tmp_path / "back")
    capsys.readouterr()
    differences = []
    for words in (["export", "gguf", run, file, "--type", "q8_0"], ["convert", run, file, "--force"]):
        assert main(words) == 0
        wrote, _, rest = capsys.readouterr().out.partition("; the logits of both differ by ")
        assert wrote == f"wrote {file}"
        differences.append(float(rest.split()[0]))
    assert differences[0] > 1e-5 >= differences[1]
    assert main(["export", "gguf", run, file]) == 2
    assert "model.gguf, which exists; expected another name: --force" in capsys.readouterr().err
    assert main(["convert", file, back, "--to", "run"]) == 0
    texts = []
    for each in (run, back):
        capsys.readouterr()
        assert main(["generate", each, "--temperature", "0", "--max-tokens", "9"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert start_language_model(from_huggingface(file).model, file) == f"starts from {file}"


def test_a_folder_is_not_overwritten_unasked(run, tmp_path, capsys):
    target = tmp_path / "out"
    target.mkdir()
    assert main(["export", "hf", run, str(target)]) == 0  # an empty one
    (target / "model.safetensors").write_bytes(b"")
    (target / "mine.txt").write_text("mine")
    assert main(["export", "hf", run, str(target)]) == 2
    assert "which is not empty; expected another name" in capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == b""
    assert main(["export", "hf", run, str(target), "--force"]) == 0
    assert AutoModelForCausalLM.from_pretrained(target).config.vocab_size > 5
    assert (target / "mine.txt").read_text() == "mine"
    assert main(["export", "hf", run, run, "--force"]) == 2
    assert "which is the source; expected another name" in capsys.readouterr().err


def test_what_cannot_be_exported(run, tmp_path, capsys):
    assert main(["export", "hf", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
    tape, onx = "recurra export: unknown format 'tape'\n", "unknown format 'onx': did you mean onnx?\n"
    for words, code, said in ((["tape", run], 2, tape), (["onx"], 2, onx), ([], 2, "hf"), (["--help"], 0, "hf")):
        with pytest.raises(SystemExit) as ended:
            main(["export", *words])
        assert ended.value.code == code
        assert said in "".join(capsys.readouterr())


def test_the_command_that_shows_a_page_is_quoted(monkeypatch, capsys):
    written = SimpleNamespace(files={"model.onnx": 1}, difference=0.0)
    monkeypatch.setattr("recurra.cli.export.open_run", lambda run, **_: run)
    monkeypatch.setattr("recurra.cli.export.export_web", lambda *_, **__: written)
    assert main(["export", "web", "run", "a page"]) == 0
    assert "python -m http.server --directory 'a page' --bind" in capsys.readouterr().out
