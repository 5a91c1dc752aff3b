import pytest
import torch
from tests.train.conftest import quiet, same_weights
from torch import nn

from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.train.checkpoint import load_checkpoint, scored_weights
from recurra.train.config import AveragingConfig
from recurra.train.evaluate import evaluate
from recurra.train.optimizer import WeightAverage


def run(average: WeightAverage, model: nn.Linear, first: int, last: int) -> None:
    """Updates first to last; update number n makes every weight n."""
    for step in range(first, last + 1):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update(step)


@pytest.mark.parametrize(
    ("start", "decay", "mean"),
    [(0, None, 4.0), (3, None, 5.5), (6, None, 7.0), (4, 0.75, 5.6875)],
)
def test_the_average_is_of_the_weights_after_every_update_from_the_start(start, decay, mean):
    model = nn.Linear(2, 2)
    average = WeightAverage(model, AveragingConfig(start_step=start, decay=decay))
    run(average, model, 1, 7)
    torch.testing.assert_close(average.model.weight, torch.full((2, 2), mean))
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))


def test_tied_weights_stay_tied_and_orthogonal_ones_orthogonal():
    config = CompactRecurrentTransformerConfig(
        vocab_size=7, n_layer=1, d_model=8, n_heads=2, d_channel_mixing=8, segment_length=3,
        memory="ncgru", position="rnn-ncgru",
    )  # fmt: skip
    model = CompactRecurrentTransformer(config)
    average = WeightAverage(model, AveragingConfig(start_step=0))
    for step in range(1, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        average.update(step)
    mean = average.model
    assert mean.memory.rnn.cell.orthogonality_error() < 1e-5
    assert {*map(id, mean.embedding.parameters())} <= {*map(id, mean.head.parameters())}
    assert not {*map(id, mean.parameters())} & {*map(id, model.parameters())}


def test_a_run_is_scored_and_kept_by_its_average_and_goes_on_from_its_weights(make_trainer):
    settings = {"epochs": 2, "averaging": {"start_step": 3}, "eval_every": 1}
    trainer = make_trainer("average", **settings)
    trainer.fit(quiet())
    plain = make_trainer("plain", epochs=2, eval_every=1)
    plain.fit(quiet())
    assert same_weights(trainer, plain)
    assert evaluate(trainer.average.model, trainer.validation).loss == trainer.scores["last"]["loss"]
    assert trainer.scores["last"]["loss"] != plain.scores["last"]["loss"]
    path, saved = trainer.checkpoints.load("last")
    for name, weight in trainer.average.model.state_dict().items():
        assert torch.equal(scored_weights(saved)[name], weight)
    assert load_checkpoint(path)["average"]["n_averaged"] == trainer.total_steps - 3
    early = make_trainer("early", max_steps=2, averaging={"start_step": 3})
    early.fit(quiet())
    early_saved = early.checkpoints.load("last")[1]
    assert scored_weights(early_saved) is early_saved["model"]


@pytest.mark.parametrize(("start", "n_averaged"), [(3, 5), (6, 2), (1, 4), (None, None)])
def test_a_longer_run_averages_its_own_end(make_trainer, start, n_averaged):
    """Resumed after 4 of now 8 updates: an average that is to begin elsewhere leaves the updates before out."""
    make_trainer(max_steps=4, averaging={"start_step": 3}).fit(quiet())
    longer = make_trainer(max_steps=8, averaging={"start_step": start})
    longer.resume("last")
    console = quiet()
    longer.fit(console)
    assert (f"averaging.start_step was 3 and is {start}: " in console.file.getvalue()) == (start != 3)
    average = load_checkpoint(longer.checkpoints.load("last")[0])["average"]
    assert (average and average["n_averaged"]) == n_averaged
