"""lm-evaluation-harness over HTTP, beside the same model in transformers and in `recurra eval`."""

import json
import math
from pathlib import Path

import pytest

from recurra.cli import main
from recurra.serve._app import _load_model

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, which brings 30 packages: lm-eval[api]")

RECIPE = """
experiment: text
data: {path: corpus, batch_size: 1, segment_length: 5, vocabulary: words}
model: {n_layer: 1, d_model: 8, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}}
training: {epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""
TEXT = "the company said sales rose\nthe court said the market rose\nthe market said\n"
DOCUMENTS = [TEXT, "the company", "sales rose\nthe", "the court said the"]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{context}}",
        "generation_kwargs": {"until": ["rose"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run, the run for transformers, and tasks."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "corpus").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "corpus" / f"{split}.txt").write_text("\n" + TEXT)
    (folder / "recipe.yaml").write_text(RECIPE)
    words = ["--run-dir", str(folder / "run"), "--data.path", str(folder / "corpus")]
    assert main(["train", str(folder / "recipe.yaml"), *words]) == 0
    assert main(["export", "hf", str(folder / "run"), str(folder / "hf")]) == 0
    assert main(["eval", str(folder / "run")]) == 0
    choices = ["said sales", "rose", "market the\ncourt rose"]
    lines = [json.dumps({"context": context, "choices": choices}) + "\n" for context in DOCUMENTS]
    (folder / "test.jsonl").write_text("".join(lines))
    return folder


def evaluated(folder: Path, name: str, **arguments) -> tuple[list[tuple[float, bool]], list[float], list[list[str]]]:
    """Log-likelihoods of the choices and whether they are the likeliest; those of the texts, and their loss per word;
    and the words written."""
    data = {"data_files": {"test": str(folder / "test.jsonl")}, "cache_dir": str(folder / "cache")}
    same = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "num_fewshot": 0}
    tasks = [{"task": task, **same, **options} for task, options in TASKS.items()]
    found = lm_eval.simple_evaluate(name, model_args=arguments, tasks=tasks, device="cpu", bootstrap_iters=0)
    answers = {task: [answer for sample in found["samples"][task] for (answer,) in sample["resps"]] for task in TASKS}
    loss = math.log(found["results"]["rolling"]["word_perplexity,none"])
    return answers["choice"], [*answers["rolling"], loss], [text.split() for text in answers["written"]]


def test_scores_over_http_are_those_of_transformers_and_of_the_run(folder, serving, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    choices, texts, written = evaluated(folder, "hf", pretrained=str(folder / "hf"), dtype="float32", batch_size=2)
    # the server rounds each of at most 17 log-probabilities to 1e-5; sums of float32 add less
    exact = {"rel": 0, "abs": 17 * 1e-5}
    run = json.loads((folder / "run" / "eval-test.json").read_text())  # its split is a line feed and the first document
    assert run["n_targets"] == 17
    assert texts[0] == pytest.approx(-17 * run["loss"], **exact)
    assert texts[0] / 17 == pytest.approx(-run["bits_per_token"] * math.log(2), **exact)

    running = serving(models=[_load_model(str(folder / "run"), None, "best", [])])
    server = {"model": "run", "base_url": f"{running.url}/v1/completions", "tokenizer": str(folder / "hf")}
    for is_tokenized in (True, False):
        found = evaluated(folder, "local-completions", **server, batch_size=3, tokenized_requests=is_tokenized)
        assert [score for score, _ in found[0]] == pytest.approx([score for score, _ in choices], **exact)
        assert [is_greedy for _, is_greedy in found[0]] == [is_greedy for _, is_greedy in choices]
        assert found[1] == pytest.approx(texts, **exact)
        assert found[2] == written
