"""`recurra generate`: a run's folder in, text out."""

import contextlib
import io
import shutil
import sys

import pytest
from tests.cli.conftest import TEXT, failure, train_on_text

from recurra import open_run
from recurra.cli import generate, main
from recurra.decoding.steps import CompiledStep, prepare
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

GATELOOP = "{n_layer: 1, d_model: 8, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}}"
CRT = "{n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8, memory: ncgru, position: rnn-ncgru}"
TRANSFORMER_XL = "{n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8, cutoffs: [5]}"
RUNS = {
    "words": ("text", "vocabulary: words", GATELOOP),
    "bpe": ("text", "vocabulary: bpe, bpe_vocab_size: 264", GATELOOP),
    "crt": ("text-crt", "vocabulary: words", CRT),
    "txl": ("text-transformer-xl", "vocabulary: words", TRANSFORMER_XL),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """Finished runs by name; their corpora are gone."""
    folder = tmp_path_factory.mktemp("runs")
    made = {name: train_on_text(folder, name, *run, epochs=2) for name, run in RUNS.items()}
    shutil.move(folder / "corpus", folder / "moved")
    return made


def output(capsys, *words: str) -> tuple[str, str]:
    """What a command prints, and what it says beside."""
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("name", RUNS)
def test_it_prints_what_a_stream_generates(capsys, runs, name):
    out, said = output(capsys, runs[name], "--prompt", "the dog", "--max-tokens", "20", "--seed", "3", "--top-k", "5")
    run = open_run(runs[name])
    stream = Stream(run.model, run.tokenizer)
    stream.feed("the dog")
    n_read = stream.position
    text = "".join(stream.generate_text(20, seed=3, sampling=SamplingConfig(top_k=5)))
    assert out == (text if text.endswith("\n") else text + "\n")
    assert said.startswith(f"read {n_read} tokens (")
    assert "wrote 20 tokens (" in said
    assert said.endswith(" tokens/s)\n")


def test_a_terminal_gets_the_prompt_too(capsys, runs, monkeypatch):
    words = (runs["words"], "--prompt", "the dog", "--max-tokens", "5")
    continuation, _ = output(capsys, *words)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert output(capsys, *words)[0] == "the dog" + continuation


@pytest.mark.parametrize("name", ["words", "crt"])
def test_float32_weights_print_what_the_model_prints(capsys, runs, name, monkeypatch):
    words = (runs[name], "--prompt", "the dog", "--max-tokens", "20", "--seed", "3")
    expected, _ = output(capsys, *words)
    made = []
    monkeypatch.setattr(generate, "prepare", lambda *given: made.append(prepare(*given)) or made[0])
    assert output(capsys, *words, "--weights", "float32")[0] == expected
    assert isinstance(made[0], CompiledStep) == (name == "words")


PROMPT = ("--prompt", "the dog", "--max-tokens", "50")


@pytest.fixture(scope="module")
def plain(runs) -> str:
    """What comes out without options."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["generate", runs["words"], *PROMPT])
    return out.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0"],
        ["--top-k", "1"],
        ["--top-p", "0.05"],
        ["--min-p", "0.9"],
        ["--repetition-penalty", "5"],
        ["--presence-penalty", "3"],
        ["--frequency-penalty", "3"],
        ["--logit-bias", "1=9", "--logit-bias", "2=-9"],
        ["--seed", "1"],
        ["--checkpoint", "previous"],
    ],
    ids=lambda options: " ".join(options),
)
def test_every_option_makes_a_difference(capsys, runs, plain, options):
    assert output(capsys, runs["words"], *PROMPT, *options).out != plain


def test_stop(capsys, runs, plain):
    stop = plain[30:34]
    out = output(capsys, runs["words"], *PROMPT, "--stop", "not there", "--stop", stop).out
    assert out.rstrip("\n") == plain[: plain.index(stop)].rstrip("\n")


def test_a_state_goes_on_where_it_stood(capsys, runs, tmp_path):
    file = str(tmp_path / "state")
    greedy = ["--temperature", "0"]
    whole, _ = output(capsys, runs["crt"], "--prompt", "the dog", "--max-tokens", "15", *greedy)
    first, _ = output(capsys, runs["crt"], "--prompt", "the dog", "--max-tokens", "6", *greedy, "--save-state", file)
    second, _ = output(capsys, runs["crt"], "--max-tokens", "9", *greedy, "--load-state", file)
    assert (first.removesuffix("\n") + second).split() == whole.split()
    # and goes on with more text
    assert "read 3 tokens" in output(capsys, runs["crt"], "--load-state", file, "--prompt", "a cat\n").err
    message = failure(capsys, "generate", runs["txl"], "--load-state", file)
    assert "is of another model (CompactRecurrentTransformer against TransformerXL)" in message


# --- the standard input ---


@pytest.mark.parametrize("name", ["words", "bpe"])
def test_standard_input_is_a_prompt(capsys, runs, monkeypatch, name):
    words = [runs[name], "--max-tokens", "10"]
    expected = output(capsys, *words, "--prompt", TEXT * 3)
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT * 3))
    got = output(capsys, *words, "--prompt", "-")
    assert got.out == expected.out
    assert got.err.split("(")[0] == expected.err.split("(")[0]


@pytest.mark.parametrize(
    "text", ["", "one two\nthree", "a " * 40, "x" * 100, "ab cdefghijklmnop qr\ns\n\n" * 5, " x" * 9]
)
@pytest.mark.parametrize("length", [1, 20])
def test_long_lines_are_cut_before_blanks(text, length):
    parts = list(generate._lines(io.StringIO(text).readline, length))
    assert "".join(parts) == text
    assert "" not in parts
    assert all(len(part) <= 2 * length and "\n" not in part[:-1] for part in parts)
    if length >= 20 and "x" * 100 not in text:
        assert [word for part in parts for word in part.split()] == text.split()


def test_an_empty_prompt_is_no_prompt(capsys, runs):
    words = (runs["words"], "--max-tokens", "5")
    assert output(capsys, *words, "--prompt", "").out == output(capsys, *words).out


# --- errors ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "2"], "top_p is 2.0"),
        (["--logit-bias", "9000=1"], "a token of logit_bias is 9000; expected at most"),
        (["--logit-bias", "word=1"], "--logit-bias is 'word=1'; expected TOKEN=BIAS"),
        (["--temperature", "0", "--top-k", "3"], "top_k is 3; expected None at temperature 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--stop", ""], "expected texts of at least one letter"),
        (["--load-state", "nowhere"], "nowhere"),
        (["--checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_plainly(capsys, runs, words, message):
    assert message in failure(capsys, "generate", runs["words"], "--prompt", "a", *words)


def test_only_text_is_generated(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "experiment: memory-horizon\n"
        "data: {n_samples: 20, sequence_length: 8, batch_size: 8, resets_per_sample: 1}\n"
        "model: {n_layer: 1, d_model: 8}\n"
        "training: {epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}\n"
    )
    assert main(["train", str(recipe), "--run-dir", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    assert "a run of memory-horizon; expected one over text" in failure(capsys, "generate", str(tmp_path / "run"))
    assert "expected the folder of a run" in failure(capsys, "generate", str(tmp_path / "nowhere"))


def test_drafts_of_another_run(capsys, runs):
    words = (runs["words"], "--prompt", "the dog", "--max-tokens", "12", "--temperature", "0")
    expected, _ = output(capsys, *words)
    for name in ("words", "crt"):
        out, said = output(capsys, *words, "--draft", runs[name], "--draft-tokens", "3")
        assert out == expected
        assert "wrote 12 tokens" in said
        assert "drafted tokens (" in said
    assert (
        "accepted 9 of 9 drafted tokens (100%), in 3 calls"
        in output(capsys, *words, "--draft", runs["words"], "--draft-tokens", "3")[1]
    )


def test_several_continuations_side_by_side_are_those_of_their_seeds(runs, capsys):
    words = [runs["words"], "--prompt", "a cat", "--max-tokens", "6", "--stop", "\n"]
    alone = [output(capsys, *words, "--seed", str(seed))[0] for seed in (3, 4, 5)]
    texts, report = output(capsys, *words, "--seed", "3", "-n", "3")
    assert texts == "".join(f"--- {number} ---\n{text}" for number, text in enumerate(alone, 1))
    assert len(set(alone)) > 1
    assert "read 2 tokens" in report


def test_continuations_that_cannot_be(runs, capsys, tmp_path):
    for words, message in (
        (["-n", "0"], "-n is 0; expected at least 1"),
        (["-n", "2", "--draft", runs["words"]], "-n is 2; expected 1 with --draft"),
        (["-n", "2", "--save-state", str(tmp_path / "state")], "-n is 2; expected 1 with --save-state"),
        (["-n", "2", "--seed", str(2**63 - 1)], "expected seeds below 2^63"),
    ):
        assert main(["generate", runs["words"], *words]) != 0
        assert message in capsys.readouterr().err


# --- devices ---


def test_weights_for_the_cpu_are_refused_elsewhere(capsys, monkeypatch, runs):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    said = failure(capsys, "generate", runs["words"], "--device", "cuda", "--weights", "int8")
    assert "--weights is int8 with --device cuda; expected --device cpu" in said


@pytest.mark.parametrize(("words", "n_models"), [((), 1), (("-n", "2"), 1), (("--draft",), 2)])
def test_the_models_are_moved_to_the_device(capsys, monkeypatch, runs, words, n_models):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    moved = []
    monkeypatch.setattr("torch.nn.Module.to", lambda model, device: moved.append(device) or model)
    words = [*words, runs["words"]] if words == ("--draft",) else words
    output(capsys, runs["words"], "--prompt", "the dog", "--max-tokens", "3", "--device", "cuda", *words)
    assert moved == ["cuda"] * n_models
