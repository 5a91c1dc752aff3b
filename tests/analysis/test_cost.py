"""Counts against matrix products counted by hand: a product (m, k) x (k, n) is 2 m k n FLOPs."""

from functools import cache, partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recurra.analysis.cost import MeasuredCost, measured_cost
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.ops._toolkit.backends import NUMBA_IS_MISSING
from recurra.ops.cells.orthogonal import NCGRUCell, Neumann

V, N, D, HEADS, D_HEAD, FF = 11, 5, 8, 3, 5, 7
C = HEADS * D_HEAD
SIZES = {"vocab_size": V, "segment_length": N, "d_model": D, "n_heads": HEADS, "d_head": D_HEAD, "d_channel_mixing": FF}


def xl(n_layer=1, mem_len=0, **options):
    return TransformerXL(TransformerXLConfig(**{**SIZES, "n_layer": n_layer, "mem_len": mem_len, **options}))


def crt(n_layer=1, memory="gru", position="rnn-gru", **options):
    config = {**SIZES, "n_layer": n_layer, "memory": memory, "position": position, **options}
    return CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**config))


def gateloop(**mixer_options):
    return LanguageModel(
        LanguageModelConfig(
            vocab_size=V,
            output_size=13,
            n_layer=2,
            d_model=D,
            d_channel_mixing=FF,
            mixer_options={"d_qk": 6, "d_v": 6, **mixer_options},
        )
    )


@cache
def cost(make, *given, **options) -> MeasuredCost:
    """The cost of a model for N tokens; counting takes a third of a second, so every model is counted once."""
    return measured_cost(make(*given, **options), N)


def attention(n_queries: int, n_keys: int) -> int:
    """Queries; keys and values; output projection; scores and weighted values."""
    projections = 2 * n_queries * D * C + 2 * n_keys * D * 2 * C + 2 * n_queries * C * D
    return projections + 2 * (2 * n_queries * n_keys * C)


def feed_forward(n_steps: int) -> int:
    return 2 * n_steps * D * FF + 2 * n_steps * FF * D


# --- FLOPs ---


def test_a_layer_of_the_transformer():
    positions = 2 * (N + 1) * D * C + 2 * N * C * (N + 1)  # W_R R, and queries with it
    measured = cost(xl)
    assert measured.block_flops == attention(N, N) + positions + feed_forward(N)
    assert measured.vocabulary_flops == 2 * N * D * V


def test_a_layer_of_transformer_xl_whose_memory_takes_two_segments_to_fill():
    keys = 7 + N
    positions = 2 * N * C * D + 2 * N * HEADS * D * (keys + 1)  # queries W_R, and R with them: the cheaper order here
    measured = cost(xl, mem_len=7)
    assert measured.block_flops == attention(N, keys) + positions + feed_forward(N)


RNN = 2 * N * D * 3 * D + 2 * N * D * 2 * D + 2 * N * D * D  # W x for all three, U_r h and U_u h, U_c (r h)


@pytest.mark.parametrize("cell", ["gru", "ncgru"])
def test_a_layer_of_the_compact_recurrent_transformer(cell):
    """The memory is one more step in the blocks; computing NCGRU's orthogonal matrix is not part of a segment."""
    measured = cost(crt, memory=cell, position=f"rnn-{cell}")
    assert measured.block_flops == 2 * RNN + attention(N + 1, N + 1) + feed_forward(N + 1)
    assert measured.vocabulary_flops == 2 * N * D * V


def test_the_neumann_series_of_an_orthogonal_matrix_is_not_the_segments():
    model = crt()
    model.memory.rnn.cell = NCGRUCell(D, D, neumann=Neumann())
    assert measured_cost(model, N).block_flops == cost(crt).block_flops


def test_the_max_headed_gateloop_with_its_recurrence():
    products = 2 * N * D * 3 * 6 + 2 * N * D * 2 * 6 + 2 * N * 6 * D + feed_forward(N)
    recurrence = 0 if NUMBA_IS_MISSING else 9 * N * 6
    measured = cost(gateloop)
    assert measured.block_flops == 2 * (products + recurrence)
    assert measured.vocabulary_flops == 2 * N * D * 13


MODELS = {
    "transformer": lambda: xl(2),
    "transformer-xl": lambda: xl(2, mem_len=7),
    "transformer-xl, one projection": lambda: xl(cutoffs=[4, 7], d_embedding=4, tie_projections=[True] * 3),
    "crt": lambda: crt(2),
    "crt-ncgru": lambda: crt(2, "ncgru", "rnn-ncgru", cutoffs=[4]),
    "gateloop": gateloop,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_same_as_when_it_is_run(name):
    model = MODELS[name]().eval()
    tokens, state = torch.randint(V, (1, N)), None
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            state = model(tokens, state)[1]
        with FlopCounterMode(display=False) as counter:
            model(tokens, state)
    measured = cost(MODELS[name])
    assert measured.block_flops + measured.vocabulary_flops == counter.get_total_flops()


# --- parameters and state ---

ATTENTION_PARAMETERS = 4 * D * C
BLOCK_PARAMETERS = ATTENTION_PARAMETERS + 2 * D * FF + FF + D + 4 * D


def test_parameters_of_the_compact_recurrent_transformer():
    gru = 6 * D * D + 3 * D
    assert cost(crt, 2).block_parameters == 2 * BLOCK_PARAMETERS + 2 * gru
    ncgru = gru - D * D + D * (D - 1) // 2
    of_ncgru = cost(crt, 2, "ncgru", "rnn-ncgru")
    assert of_ncgru.block_parameters == 2 * BLOCK_PARAMETERS + 2 * ncgru


@pytest.mark.parametrize(
    ("counted", "n_bytes"),
    [
        (partial(cost, xl), 0),
        (partial(cost, xl, mem_len=4), 4 * D * 4),
        (partial(cost, xl, 2, mem_len=13), 2 * 13 * D * 4),
        (partial(cost, crt, 2), 3 * D * 4),  # m, and the two RNNs that start from it
        (partial(cost, crt, 1, "none", "relative"), 0),
        (partial(cost, crt, 1, "gru", "relative"), 2 * D * 4),
        (partial(cost, gateloop), 2 * 6 * 8),
        (partial(cost, gateloop, n_heads=2), 2 * 2 * 3 * 3 * 8),
    ],
)
def test_bytes_between_two_segments(counted, n_bytes):
    assert counted().state_bytes == n_bytes


# --- how it is counted ---


def test_no_weight_is_allocated():
    with torch.device("meta"):
        model = xl(vocab_size=10**12)
    measured = measured_cost(model, N)
    assert measured.vocabulary_flops == 2 * N * D * 10**12
    assert measured.parameters > D * 10**12


@pytest.mark.parametrize("name", ["crt-ncgru"])
def test_the_model_stays_as_it_was(name):
    model = MODELS[name]()
    model.blocks[0].eval()
    places = dict(model.named_parameters(remove_duplicate=False))
    values = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    measured_cost(model, N)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(places)
    assert all(after[key] is place for key, place in places.items())
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes


def test_lengths_that_are_not_the_models_are_refused():
    with pytest.raises(ValueError, match="segment_length is 4; expected 5, the length of the model's segments"):
        measured_cost(crt(), 4)
    with pytest.raises(ValueError, match="segment_length is 0; expected at least 1"):
        measured_cost(gateloop(), 0)


@pytest.mark.parametrize("mixer", ["min-gru", "linear-rnn", "mamba2", "gated-delta-net", "rotary-attention"])
def test_every_mixer_can_be_counted_without_numbers(mixer):
    """In a process of fake tensors, which have no memory that a kernel could read."""
    options = {"window": 9} if mixer == "rotary-attention" else {}
    model = LanguageModel(LanguageModelConfig(V, None, 1, 16, 8, mixer=mixer, mixer_options=options))
    found = measured_cost(model, 6)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.block_flops > 0
    assert found.state_bytes > 0


def test_a_state_that_grows_for_long_is_refused(monkeypatch):
    monkeypatch.setattr("recurra.analysis.cost._MOST_SEGMENTS", 3)
    config = LanguageModelConfig(
        11, None, 1, 12, 16, mixer="rotary-attention", mixer_options={"window": 9, "n_heads": 2}
    )
    model = LanguageModel(config)
    with pytest.raises(ValueError, match=r"LanguageModel whose state still grows after 3 segments; .* longer"):
        measured_cost(model, 1)
    assert measured_cost(model, 4).state_bytes > 0
