"""The models under lm-evaluation-harness, by its own command line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recurra.convert.huggingface.folder import save_folder
from recurra.convert.portable import PortableModel
from recurra.data.tokenizers import Vocabulary
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs lm-evaluation-harness, which brings 30 packages: pip install lm-eval",
)

LINES = ["a cat sat on a mat", "a dog sat on a cat and a mat", "a mat", "a dog and a cat sat"]
TASK = """
task: little
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
---
"""
ROLLING = """
task: little_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


@torch.no_grad()
def log_probability(model, vocabulary, text, after):
    """log p(text | after), where a text begins as a line does."""
    before = vocabulary.encode(after).tolist() or [vocabulary.eos]
    tokens = vocabulary.encode(text).tolist()
    logits = model(torch.tensor([before + tokens]))[0][0].log_softmax(-1)
    return sum(float(logits[len(before) - 1 + place, token]) for place, token in enumerate(tokens))


@pytest.mark.slow
def test_its_scores_are_the_models(tmp_path):
    vocabulary = Vocabulary.from_text([line + "\n" for line in LINES])
    sizes = {"n_layer": 1, "d_model": 12, "n_heads": 2, "d_channel_mixing": 16, "segment_length": 4}
    model = CompactRecurrentTransformer(CompactRecurrentTransformerConfig(vocab_size=len(vocabulary), **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    save_folder(PortableModel(model, vocabulary), tmp_path / "model")
    documents = [
        {"question": line, "choices": ["cat", "dog sat on", "mat and a"], "answer": row % 3}
        for row, line in enumerate(LINES)
    ]
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "little.yaml").write_text(TASK.format(data=data).replace("---\n", ""))
    (tasks / "little_perplexity.yaml").write_text(ROLLING.format(data=data))
    command = [sys.executable, "-m", "recurra.convert.huggingface", "lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={tmp_path / 'model'},dtype=float32", "--include_path", str(tasks)]
    command += ["--tasks", "little,little_perplexity", "--batch_size", "2", "--output_path", str(tmp_path / "out")]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    written = json.loads(next(Path(tmp_path / "out").rglob("results*.json")).read_text())["results"]

    right = 0
    for document in documents:
        scores = [
            log_probability(model, vocabulary, f" {choice}", document["question"]) for choice in document["choices"]
        ]
        right += scores.index(max(scores)) == document["answer"]
    assert written["little"]["acc,none"] == pytest.approx(right / len(documents))
    total = sum(log_probability(model, vocabulary, line, "") for line in LINES)
    n_words = sum(len(line.split()) for line in LINES)
    expected = float(torch.tensor(-total / n_words).exp())
    assert written["little_perplexity"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-5)
