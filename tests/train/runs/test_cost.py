"""What the models of recipes and runs cost."""

import json
import shutil
from pathlib import Path

import pytest

from recurra.analysis.cost import measured_cost
from recurra.data.tokenizers import Vocabulary
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.train._figures import cost_curves, cost_of, scored_perplexity

MODEL = {"n_layer": 1, "d_model": 8, "n_heads": 2, "d_channel_mixing": 6}
COMMON = f"""
data: {{path: nowhere, segment_length: 5, batch_size: 2}}
model: {json.dumps(MODEL)}
training: {{epochs: 1, log_every: 5, tensorboard: false, accelerator: cpu, threads: 1}}
"""
TRANSFORMER_XL = "experiment: text-transformer-xl" + COMMON
CRT = "experiment: text-crt" + COMMON
HORIZON = """
experiment: memory-horizon
data: {n_samples: 20, sequence_length: 9, batch_size: 2, resets_per_sample: 2, modulus: 7}
model: {n_layer: 1, d_model: 8, d_channel_mixing: 16}
"""


def written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture
def corpus(tmp_path) -> Path:
    for split, n_lines in (("train", 20), ("valid", 3), ("test", 4)):
        written(tmp_path / "corpus" / f"{split}.txt", " the cat sat on a mat \n" * n_lines)
    return tmp_path / "corpus"


N_WORDS = 6 + 2
"""Those of the corpus, <eos> and <unk>."""


def test_numbers_are_those_of_the_recipes_models(tmp_path):
    sizes = {**MODEL, "n_layer": 2, "vocab_size": 23, "segment_length": 5}
    models = {
        "Transformer-XL": (TRANSFORMER_XL, TransformerXL(TransformerXLConfig(**sizes))),
        "CRT-GRU": (CRT, CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**sizes))),
    }
    for kind, (recipe, model) in models.items():
        word = written(tmp_path / "recipe.yaml", recipe)
        row = cost_of(word, ["--model.n_layer", "2"], vocabulary=23)
        assert (row.name, row.kind, row.n_layer, row.segment_length) == (word, kind, 2, 5)
        assert row.measured == measured_cost(model, 5)
        if kind == "Transformer-XL":
            assert row.published == (2 * (28 * 5 * 64 + 12 * 25 * 8 + 6 * 25), 2 * (640 + 48))


def test_the_vocabulary_is_the_corpuss_if_none_is_given(tmp_path, corpus):
    recipe, moved = written(tmp_path / "crt.yaml", CRT), ["--data.path", str(corpus)]
    assert cost_of(recipe, moved).measured.vocabulary_flops == 2 * 5 * 8 * N_WORDS
    assert cost_of(recipe, moved, vocabulary=100).measured.vocabulary_flops == 2 * 5 * 8 * 100


def test_a_model_without_a_formula_is_counted_alone(tmp_path):
    row = cost_of(written(tmp_path / "horizon.yaml", HORIZON))
    assert (row.kind, row.segment_length, row.published) == ("language model (gateloop)", 9, None)
    assert row.measured.vocabulary_flops == 2 * 9 * 8 * 7
    assert row.as_plain()["published"] is None
    assert json.loads(json.dumps(row.as_plain()))["measured"] == row.measured._asdict()


@pytest.mark.parametrize(
    ("recipe", "overrides", "vocabulary", "message"),
    [
        (CRT, [], None, "give the size of its vocabulary, as in --vocabulary 10000"),
        (CRT, [], 0, "vocabulary is 0; expected at least 1"),
        (CRT, ["--model.cutoffs", "[12]"], 9, "cutoffs"),
        (HORIZON, [], 9, "experiment is memory-horizon; expected one over text"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path, recipe, overrides, vocabulary, message):
    with pytest.raises((ValueError, OSError), match=message):
        cost_of(written(tmp_path / "recipe.yaml", recipe), overrides, vocabulary=vocabulary)


def scored_run(folder: Path, recipe: str, perplexity: float, name: str = "eval-test.json") -> str:
    written(folder / "config.yaml", recipe)
    written(folder / name, json.dumps({"perplexity": perplexity}))
    return str(folder)


def test_the_vocabulary_of_a_run_is_its_own_with_or_without_its_corpus(tmp_path, corpus):
    run = scored_run(tmp_path / "a", CRT.replace("nowhere", str(corpus)), 61.5)
    Vocabulary(["the", "cat", "<eos>", "<unk>"]).save(Path(run) / "tokenizer.json")  # before the corpus grew
    found = cost_of(run).measured
    assert found == cost_of(run, vocabulary=4).measured
    shutil.rmtree(corpus)
    assert cost_of(run).measured == found


def test_points_are_the_runs_blocks_and_perplexities(tmp_path):
    runs = [
        scored_run(tmp_path / "a", CRT, 61.5),
        scored_run(tmp_path / "b", CRT.replace("segment_length: 5", "segment_length: 3"), 66.0),
        scored_run(tmp_path / "c", TRANSFORMER_XL, 70.0),
    ]
    rows = [cost_of(run, vocabulary=9) for run in runs]
    flops = [row.measured.block_flops for row in rows]
    assert cost_curves(rows, [scored_perplexity(run) for run in runs]) == {
        "CRT-GRU": [(5, flops[0], 61.5), (3, flops[1], 66.0)],
        "Transformer-XL": [(5, flops[2], 70.0)],
    }
