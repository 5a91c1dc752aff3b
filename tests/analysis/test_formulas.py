import pytest
import torch

from recurra.analysis.cost import PublishedCost, _crt_gru, _transformer, _transformer_xl, model_kind, published_cost
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

SIZES = {"vocab_size": 11, "segment_length": 3, "n_layer": 2, "d_model": 6, "n_heads": 2, "d_channel_mixing": 7}


def crt(**options):
    with torch.device("meta"):
        return CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**{**SIZES, **options}))


def xl(**options):
    with torch.device("meta"):
        return TransformerXL(TransformerXLConfig(**{**SIZES, **options}))


def test_the_rows_of_table_1_by_hand():
    """L = 2, n = 3, d = 5, with each term computed by itself."""
    assert _transformer(2, 3, 5) == PublishedCost(2 * (1500 + 270), 2 * (250 + 30))
    assert _transformer_xl(2, 3, 5) == PublishedCost(2 * (2100 + 540 + 54), 2 * (250 + 30))
    assert _crt_gru(2, 3, 5) == PublishedCost(75 * 36 + 720, 28 * 25 + 14 * 5)


@pytest.mark.parametrize(
    ("make", "options", "kind", "row"),
    [
        (xl, {"mem_len": 0}, "Transformer", _transformer),
        (xl, {"mem_len": 3}, "Transformer-XL", _transformer_xl),
        (xl, {"mem_len": 4}, "Transformer-XL", None),
        (crt, {"memory": "none", "position": "relative"}, "Transformer", _transformer),
        (crt, {"memory": "gru", "position": "rnn-gru"}, "CRT-GRU", _crt_gru),
        (crt, {"memory": "ncgru", "position": "rnn-ncgru"}, "CRT-NCGRU", _crt_gru),
        (crt, {"memory": "ncgru", "position": "rnn-gru"}, "CRT (memory ncgru, position rnn-gru)", None),
        (crt, {"memory": "gru", "position": "relative"}, "CRT (memory gru, position relative)", None),
        (crt, {"memory": "none", "position": "rnn-gru"}, "CRT (memory none, position rnn-gru)", None),
    ],
)
def test_a_model_gets_the_row_that_is_about_it(make, options, kind, row):
    model = make(**options)
    assert model_kind(model) == kind
    assert published_cost(model) == (None if row is None else row(2, 3, 6))


def test_models_that_the_paper_has_no_row_for():
    model = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=4, n_layer=2, mixer=["gateloop", "gateloop"]))
    assert (model_kind(model), published_cost(model)) == ("language model (gateloop)", None)
    assert (model_kind(torch.nn.Linear(2, 2)), published_cost(torch.nn.Linear(2, 2))) == ("Linear", None)
