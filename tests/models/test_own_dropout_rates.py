"""The rates of dropout for what enters and what leaves the blocks of the Transformers that read segments."""

import pytest
import torch

from recurra.models.block_recurrent_transformer import BlockRecurrentTransformer, BlockRecurrentTransformerConfig
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformer, RecurrentMemoryTransformerConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

MODELS = {
    "transformer-xl": (TransformerXL, TransformerXLConfig),
    "crt": (CompactRecurrentTransformer, CompactRecurrentTransformerConfig),
    "recurrent-memory": (RecurrentMemoryTransformer, RecurrentMemoryTransformerConfig),
    "block-recurrent": (BlockRecurrentTransformer, BlockRecurrentTransformerConfig),
}
SIZES = {"n_layer": 2, "d_model": 64, "n_heads": 2, "d_channel_mixing": 12, "vocab_size": 13, "segment_length": 5}


def dropped(kind, **rates):
    """Return the shares of zeros among what the blocks read and among what the head reads, in training."""
    torch.manual_seed(3)
    model_class, config_class = MODELS[kind]
    model = model_class(config_class(**SIZES, **rates))
    tokens = torch.randint(13, (8, 20))
    entering = model.embed(tokens)
    leaving, _ = model.body(entering, None)
    return tuple(float((x == 0).double().mean()) for x in (entering, leaving))


@pytest.mark.parametrize("kind", MODELS)
def test_what_enters_and_leaves_the_blocks_has_rates_of_its_own(kind):
    assert dropped(kind, dropout=0.0, input_dropout=0.6, output_dropout=0.2) == pytest.approx((0.6, 0.2), abs=0.03)
    assert dropped(kind, dropout=0.5, input_dropout=0.0, output_dropout=0.0) == (0, 0)
    assert dropped(kind, dropout=0.4, output_dropout=0.1) == pytest.approx((0.4, 0.1), abs=0.03)


@pytest.mark.parametrize("kind", MODELS)
def test_dropouts_act_in_training_alone(kind):
    model_class, config_class = MODELS[kind]
    tokens = torch.randint(13, (2, 9))
    for name in ("dropout", "attention_dropout", "embedding_dropout"):
        model = model_class(config_class(**SIZES, **{"dropout": 0.0, name: 0.5}))
        assert not torch.equal(model(tokens)[0], model(tokens)[0]), name
        model.eval()
        assert torch.equal(model(tokens)[0], model(tokens)[0]), name
