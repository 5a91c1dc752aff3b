"""Compiled steps of hybrids: rows whose windows hold different numbers of steps, and states in whole numbers."""

import copy

import pytest
import torch
from torch import nn

from recurra import state as states
from recurra.decoding import _windows
from recurra.decoding._program import StepProgram, lower_step
from recurra.decoding._states import prepare_states
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import CompiledStep, prepare
from recurra.layers.quantization import dequantized, quantized, quantized_size
from recurra.mixers.mla import MultiHeadLatentAttention
from recurra.mixers.rotary_attention import RotaryAttention, RotaryAttentionState
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import Ragged, map_tensors, tensors

pytestmark = pytest.mark.compile
HYBRIDS = {
    "groups": ("rotary-attention", {"n_heads": 4, "n_kv_heads": 2, "window": None}),
    "odd": ("rotary-attention", {"n_heads": 3, "d_head": 20, "window": 7, "rotated_share": 0.5}),
    "unrotated": ("rotary-attention", {"n_heads": 2, "window": 2, "d_head": 32, "rotated_share": 0.0}),
    "scaled": ("rotary-attention", {"n_heads": 2, "n_kv_heads": 1, "window": 70, "query_scale": 0.7, "qk_norm": 1e-6}),
    "gated": ("gated-attention", {"n_heads": 2, "window": 90}),
    "latents": ("mla", {"n_heads": 3, "d_head": 10, "d_latent": 20, "d_shared": 6, "window": None}),
    "latents without positions": ("mla", {"n_heads": 2, "window": 9, "rotation_base": None, "d_query_latent": 8}),
    "beside": ("mamba2-attention", {"n_heads": 2, "d_state": 8, "n_mamba_heads": 2, "window": None}),
}


def hybrid(name="groups", other="gated-delta-net"):
    mixer, options = HYBRIDS[name]
    config = LanguageModelConfig(
        vocab_size=31,
        n_layer=2,
        d_model=48,
        d_channel_mixing=41,
        mixer=[mixer, other],
        mixer_options={mixer: options, other: {"n_heads": 2}},
    )
    return LanguageModel(config).eval()


def compiled(model, *batches):
    """A compiled step, recorded for one row and for these batches, and the calls that go through the model."""
    step, calls = CompiledStep(model, 31), []
    for rows in batches:
        step.program(min(size for size in step.sizes if size >= rows))
    step.model.register_forward_hook(lambda *_: calls.append(1))
    return step, calls


def assert_same_state(mine, right, tolerance):
    for x, y in zip(tensors(mine), tensors(right), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not x.is_floating_point():
            x, y = (dequantized(part, part.shape[-1] - 4 // part.dtype.itemsize) for part in (x, y))
        assert not x.numel() or (x - y).abs().max() <= tolerance * y.abs().max()


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, cache) for name in HYBRIDS for cache in ("float32", "int8") if cache == "float32" or "latent" not in name],
)
def test_a_stream_is_the_models(name, cache, monkeypatch):
    """Of 100 steps: the windows slide, and the memory behind a state is exchanged for a larger one."""
    monkeypatch.setattr(_windows, "_LEAST_ROOM", 16)
    model = pack_linear_layers(hybrid(name), kv_cache_dtype=cache)
    (step, calls), state, other = compiled(copy.deepcopy(model)), None, None
    # a code between two others may be rounded to either, and moves what follows by a 127th of the largest number
    tolerance = 5e-6 if cache == "float32" else 0.02
    for piece in torch.randint(31, (1, 100)).split([60, *[1] * 34, 3, *[1] * 3], 1):
        expected, state = model(piece, state)
        logits, other = step(piece, other)
        assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
        assert_same_state(other, state, tolerance)
    assert len(calls) == 2  # the pieces


@pytest.mark.parametrize(
    ("name", "cache", "rows"),
    [
        *((name, cache, 11) for name in ("groups", "odd", "beside") for cache in ("float32", "int8")),
        *(("groups", cache, rows) for cache in ("float32", "int8") for rows in (3, 16)),
        ("latents", "float32", 11),
    ],
)
def test_streams_at_different_positions_are_each_what_they_are_alone(name, cache, rows):
    step, calls = compiled(pack_linear_layers(hybrid(name), kv_cache_dtype=cache), rows)
    alone = [step.model(torch.randint(31, (1, 1 + 7 * number)))[1] for number in range(rows)]
    together = states.batch(alone)
    assert isinstance(together, Ragged)
    calls.clear()
    for tokens in torch.randint(31, (9, rows, 1)):
        logits, together = step(tokens, together)
        for number, token in enumerate(tokens.split(1)):
            expected, alone[number] = step(token, alone[number])
            assert torch.equal(logits[number : number + 1], expected)
    assert not calls
    for mine, right in zip(states.split(together), alone, strict=True):
        assert_same_state(mine, right, 0)
    some = states.select(together, torch.tensor([2, 0]))
    assert_same_state(states.split(some)[1], alone[0], 0)
    expected = step.model(torch.tensor([[4, 5], [6, 7]]), states.batch([alone[2], alone[0]]))[0]
    assert torch.equal(step(torch.tensor([[4, 5], [6, 7]]), some)[0], expected)  # by the model, which takes such states
    step.model.require_state(some, 2)


def test_streams_that_join_others():
    step, calls = compiled(pack_linear_layers(hybrid()), 2, 3)
    singles = [step.model(torch.randint(31, (1, length)))[1] for length in (4, 9, 9)]
    one, two = step(torch.tensor([[1], [2]]), states.batch(singles[:2]))[1], singles[2]
    calls.clear()
    logits, after = step(torch.tensor([[3], [4], [5]]), states.join([one, two]))
    for number, (token, single) in enumerate(zip((3, 4, 5), [*states.split(one), two])):
        expected, _ = step(torch.tensor([[token]]), single)
        assert torch.equal(logits[number], expected[0])
    assert not calls
    assert states.n_streams(after) == 3


@pytest.mark.parametrize(("name", "cache"), [("groups", "float32"), ("groups", "int8"), ("latents", "float32")])
def test_a_state_stays_what_it_was(name, cache):
    """Two continue one state, which both leave as it is, and neither sees the other's steps."""
    step, _ = compiled(pack_linear_layers(hybrid(name), kv_cache_dtype=cache))
    _, start = step(torch.tensor([[1]]), step.model(torch.tensor([[3, 4, 5]]))[1])
    before = map_tensors(torch.Tensor.clone, start)
    found = []
    for first in (7, 8, 7):
        state = start
        for token in (first, 2, 3):
            logits, state = step(torch.tensor([[token]]), state)
        found.append((logits, state))
    assert_same_state(start, before, 0)
    assert torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][0], found[1][0])
    assert_same_state(found[0][1], found[2][1], 0)


@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_latents_with_rounded_weights(numbers):
    model = pack_linear_layers(hybrid("latents"), numbers)
    step, state = CompiledStep(model, 31), model(torch.randint(31, (2, 3)))[1]
    for token in torch.randint(31, (70, 2, 1)):
        logits, after = step(token, state)
        expected, state = model(token, state)
        assert (logits - expected).abs().max() <= 0.1 * expected.abs().max()
        assert_same_state(after, state, 0.1)


def test_states_that_the_model_refuses():
    step, _ = compiled(pack_linear_layers(hybrid("odd")))
    tokens = torch.randint(31, (2, 5))
    _, known = step.model(tokens)
    keys, values = known.layers[0]
    beyond = RotaryAttentionState(*(part.repeat(1, 6, 1, 1) for part in (keys, values)))
    too_long = known._replace(layers=(beyond, *known.layers[1:]))  # more steps than the window has
    two_in_one = Ragged((known, states.select(known, slice(0, 1))))
    for state, rows in ((too_long, 2), (two_in_one, 3)):
        with pytest.raises(ValueError, match="expected"):
            step(tokens[:1, :1].expand(rows, 1), state)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_copies_no_keys(rows):
    """Those of the last state are continued where they are."""
    step, _ = compiled(pack_linear_layers(hybrid()), rows)
    _, state = step(torch.ones(rows, 1, dtype=torch.int64), step.model(torch.ones(rows, 3, dtype=torch.int64))[1])
    places = set()
    for _ in range(20):
        _, state = step(torch.ones(rows, 1, dtype=torch.int64), state)
        places.add(state.layers[0].keys.data_ptr())
    assert len(places) == 1


class _Attention(nn.Module):
    """Attention alone, whose queries, keys and values are given."""

    def __init__(self, cache, **options):
        super().__init__()
        self.mixer = RotaryAttention(32, **options)
        prepare_states(self.mixer, cache, "float32")

    def forward(self, queries, keys, values, *past):
        y, state = self.mixer.attend(queries, keys, values, RotaryAttentionState(*past))
        return y * 1.0, *state


@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize(("heads", "groups", "d_head", "past"), [(3, 3, 20, 1), (6, 2, 16, 130), (5, 1, 36, 4_170)])
def test_attention_is_that_in_float64(heads, groups, d_head, past, cache):
    """To steps in one block, in several, and beyond 64 blocks; new codes equal those of torch."""
    made = _Attention(cache, n_heads=heads, n_kv_heads=groups, d_head=d_head, window=None, rotation_base=100.0)
    exact = RotaryAttention(32, n_heads=heads, n_kv_heads=groups, d_head=d_head, window=None, rotation_base=100.0)
    queries, keys, values = (torch.randn(2, 1, n, d_head) for n in (heads, groups, groups))
    kept = [torch.randn(2, past, groups, d_head) for _ in range(2)]
    coded = [quantized(part, torch.int8) for part in kept] if cache == "int8" else kept
    recorded = [part[:, :1] for part in coded]
    program = StepProgram(lower_step(made, [queries, keys, values, *recorded]))
    y, *after = program.run([queries, keys, values, *coded])
    new = [torch.cat(pair, 1) for pair in zip(kept, (keys, values))]
    if cache == "int8":
        assert all(torch.equal(part[:, -1:], quantized(x, torch.int8)) for part, x in zip(after, (keys, values)))
        new = [dequantized(quantized(part, torch.int8), d_head) for part in new]
    else:
        assert all(map(torch.equal, after, new))
    state = RotaryAttentionState(*(part[:, :-1].double() for part in new))
    expected, _ = exact.attend(queries.double(), *(part[:, -1:].double() for part in new), state)
    # scores are sums of up to 36 products, off by some 1e-6, and so are the weights of values of up to 5
    assert (y - expected).abs().max() <= 1e-6 * new[1].abs().max()


@pytest.mark.parametrize(("codes", "most"), [(torch.int8, 127), (torch.int16, 32_767)])
def test_quantised_vectors(codes, most):
    x = torch.randn(3, 2, 20) * torch.tensor([1e-20, 1.0, 1e20])[:, None, None]
    x[1, 0] = 0
    kept = quantized(x, codes)
    assert kept.shape == (3, 2, quantized_size(20, codes))
    largest = x.abs().amax(-1, keepdim=True)
    assert ((dequantized(kept, 20) - x).abs() <= largest * (0.5 / most + 1e-6)).all()
    assert quantized_size(64, codes) * codes.itemsize == 64 * codes.itemsize + 4


MATRICES = {
    "mamba2": {"n_heads": 2, "d_state": 9},
    "mamba2-attention": {"n_heads": 2, "d_state": 8, "n_mamba_heads": 2},
    "gated-delta-net": {"n_heads": 2},
    "kda": {"n_heads": 2},
    "gla": {"n_heads": 2},
    "mlstm": {"n_heads": 2},
    "rwkv7": {"n_heads": 2},
}


@pytest.mark.parametrize("mixer", MATRICES)
def test_matrices_in_int16(mixer):
    """A code between two others may be rounded to either; float32 differs by some such steps of the largest number."""
    config = LanguageModelConfig(vocab_size=31, n_layer=2, d_model=48, mixer=mixer, mixer_options=MATRICES[mixer])
    exact = LanguageModel(config).eval()
    model = pack_linear_layers(exact, state_dtype="int16")
    (step, calls), state, other, right = compiled(copy.deepcopy(model)), None, None, None
    for tokens in torch.randint(31, (1, 22)).split([3, *[1] * 12, 7], 1):
        expected, state = model(tokens, state)
        logits, other = step(tokens, other)
        reference, right = exact(tokens, right)
        assert (logits - expected).norm() <= 1e-3 * expected.norm()
        assert (logits - reference).norm() <= 3e-3 * reference.norm()
        assert_same_state(other, state, 5e-3)
    assert len(calls) == 2  # the pieces
    assert states.n_bytes(other.layers[0].h) < 0.56 * states.n_bytes(right.layers[0].h)


def test_int16_is_refused_where_steps_cannot_read_it():
    config = LanguageModelConfig(vocab_size=31, n_layer=1, d_model=24, mixer="mamba3", mixer_options={"n_heads": 2})
    with pytest.raises(ValueError, match="state_dtype is int16; expected float32 for this model"):
        prepare(LanguageModel(config).eval(), state_dtype="int16")
    with pytest.raises(ValueError, match="state_dtype is 'int16'; expected float32 for a model without matrices"):
        prepare(LanguageModel(LanguageModelConfig(vocab_size=31, mixer="min-gru")).eval(), state_dtype="int16")


def test_what_has_no_keys_is_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8'; expected float32 for a model without"):
        prepare(LanguageModel(LanguageModelConfig(vocab_size=31)).eval(), kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="kv_cache_dtype is"):
        prepare(hybrid(), kv_cache_dtype="int4")


def test_all_batch_sizes_read_one_copy_of_the_weights_of_latents():
    form = prepare(hybrid("latents"), "int8")
    mixers = [part for part in form.model.modules() if isinstance(part, MultiHeadLatentAttention)]
    copies = {mixer.attend.args[1].untyped_storage().data_ptr() for mixer in mixers}
    assert copies.isdisjoint(mixer.expansion.weight.untyped_storage().data_ptr() for mixer in mixers)
    for rows in (1, 2, 3):
        assert copies <= {tensor.untyped_storage().data_ptr() for tensor in form.program(rows)._kept}
