"""Models of segments in the trainer: steps of several segments, and scores that no cut changes."""

import math

import pytest
import torch
from tests.train.conftest import quiet

from recurra.data.text import TextConfig
from recurra.models.block_recurrent_transformer import BlockRecurrentTransformerConfig
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformerConfig
from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformerConfig
from recurra.models.transformer_xl import TransformerXLConfig
from recurra.train.config import OptimizerConfig, TrainingConfig
from recurra.train.evaluate import evaluate
from recurra.train.experiment import Experiment
from recurra.train.loop import Trainer
from recurra.train.metrics import read_metrics
from recurra.train.run_folder import RunFolder

SMALL = {"n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 12, "dropout": 0.1, "attention_dropout": 0.1}
KINDS = {
    TransformerXLConfig: "text-transformer-xl",
    CompactRecurrentTransformerConfig: "text-crt",
    RecurrentMemoryTransformerConfig: "text-rmt",
    BlockRecurrentTransformerConfig: "text-block-recurrent-transformer",
}
MODELS = {
    "transformer-xl": TransformerXLConfig(**SMALL, cutoffs=[4, 7]),
    "crt-ncgru": CompactRecurrentTransformerConfig(**SMALL, memory="ncgru", position="rnn-ncgru", cutoffs=[4, 7]),
    "rmt": RecurrentMemoryTransformerConfig(**SMALL, n_memory=2),
    "block-recurrent": BlockRecurrentTransformerConfig(**SMALL, n_states=2),
}


@pytest.fixture
def corpus(tmp_path):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "off"]
    for split, n_lines in (("train", 40), ("valid", 9), ("test", 7)):
        lines = [" ".join(words[(i + j) % 10] for j in range(5 + i % 4)) for i in range(n_lines)]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "model",
    [
        "crt-ncgru",
        "rmt",
        pytest.param("transformer-xl", marks=pytest.mark.slow),
        pytest.param("block-recurrent", marks=pytest.mark.slow),
    ],
)
def test_it_learns_and_its_perplexity_is_that_of_any_cut(corpus, model):
    sizes = {"batch_size": 2, "segment_length": 4, "bptt_segments": 2, "cache": str(corpus / "cache")}
    settings = {"epochs": 2, "eval_every": 1000, "save_every": 1000, "log_every": 1, "tensorboard": False}
    experiment = Experiment(
        experiment=KINDS[type(MODELS[model])],
        data=TextConfig(path=str(corpus), **sizes),
        model=MODELS[model],
        optimizer=OptimizerConfig(learning_rate=0.03, gradient_clip=0.25),
        training=TrainingConfig(**settings, accelerator="cpu"),
    )
    trainer = Trainer(experiment, RunFolder(corpus / "run"), evaluate)
    trainer.fit(quiet())
    log = [row["train_loss"] for row in read_metrics(trainer.folder.metrics)]
    assert sum(log[-trainer.steps_per_epoch :]) < 0.95 * sum(log[: trainer.steps_per_epoch])
    data = trainer.experiment.build_data()
    scores = evaluate(trainer.model, data.source("test"))
    assert scores.accuracy is None
    # the whole text in one call: the segments are the model's, not the call's
    tokens = torch.from_numpy(data.tokens("test").astype("int64"))[None]
    trainer.model.eval()
    losses, _ = trainer.model.loss(tokens[:, :-1], tokens[:, 1:])
    assert scores.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    assert scores.perplexity == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
