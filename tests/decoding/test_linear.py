"""Linear layers for decoding: torch's results at every size, and the error of rounded weights."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune, spectral_norm

from recurra.decoding._products import rounded
from recurra.decoding.linear import BLOCK, DTYPES, MOST_VECTORS, DecodingLinear
from recurra.decoding.packing import pack_linear_layers
from recurra.layers.convolution import ImplicitFilters
from recurra.models.language_model import LanguageModel, LanguageModelConfig

SIZES = [(1, 1), (3, 5), (17, 3), (65, 1), (130, 33), (624, 40)]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def kept_inputs(layer, x):
    """What a layer multiplies instead of x."""
    if layer.dtype == "bfloat16":
        return x.bfloat16().float()
    return rounded(x) if layer.dtype != "float32" else x


def by_torch(layer, x):
    """The layer's result in float64, from what it keeps of its weights and its inputs."""
    return functional.linear(kept_inputs(layer, x).double(), layer.weight.double(), layer.bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_multiplies_with_the_weights_it_keeps(dtype):
    for number, (n_in, n_out) in enumerate(SIZES):
        layer = DecodingLinear(nn.Linear(n_in, n_out, bias=number % 3 > 0), dtype)
        for shape in ((n_in,), (1, 1, n_in), (2, 4, n_in), (MOST_VECTORS, n_in), (MOST_VECTORS + 1, n_in), (0, n_in)):
            x = torch.randn(shape)
            torch.testing.assert_close(layer(x).double(), by_torch(layer, x), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("numbers", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 3), (257, 129)])
def test_a_vector_comes_out_the_same_beside_any_others(numbers, n_in, n_out):
    layer, x = DecodingLinear(nn.Linear(n_in, n_out), numbers), torch.randn(MOST_VECTORS, n_in)
    alone = torch.stack([layer(vector) for vector in x])
    expected = by_torch(layer, x)
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=3e-6)
    for count in (2, 3, 4, 5, 6, 8, 11, 14, 23, MOST_VECTORS):
        assert torch.equal(layer(x[-count:]), alone[-count:])


@pytest.mark.parametrize("numbers", DTYPES)
def test_more_vectors_than_one_pass_takes(numbers):
    layer, x = DecodingLinear(nn.Linear(33, 5), numbers), torch.randn(2, 521, 33)
    y = layer(x)
    expected = by_torch(layer, x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=3e-6)
    if numbers != "float32":
        assert all(torch.equal(layer(x[at]), y[at]) for at in [(0, 0), (0, 511), (0, 512), (1, 7), (1, 520)])


def test_float32_in_a_long_sequence_is_torch_s_product_however_long():
    layer, x = DecodingLinear(nn.Linear(257, 129)), torch.randn(2, 40, 257)
    for length in (16, 40):
        part = x[:, :length].contiguous()
        assert torch.equal(layer(part), functional.linear(part, layer.weight, layer.bias))
    assert torch.equal(layer(x[:, :15])[1, 3], layer(x[1, 3]))  # a short one: our kernel, as for a single step


@pytest.mark.parametrize("numbers", DTYPES)
def test_many_rows_and_a_view_of_the_input(threads, numbers):
    layer = DecodingLinear(nn.Linear(96, 1001), numbers)  # enough work for threads, rows that do not divide
    x = torch.randn(96, 7).t()
    expected = by_torch(layer, x)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=3e-6)


def test_what_rounding_keeps_of_the_inputs():
    x = torch.randn(3, 2 * BLOCK + 5)
    x[0, :BLOCK], x[1, 0], x[2, BLOCK:] = 0.0, 1e4, 1e-35
    x[1, BLOCK : 2 * BLOCK] *= 1e-20  # small numbers are no zeros
    error = (rounded(x) - x).abs()
    for start in range(0, x.shape[1], BLOCK):
        block = x[:, start : start + BLOCK]
        half_a_step = block.abs().amax(1, keepdim=True) / 254 * 1.001
        assert (error[:, start : start + BLOCK] <= half_a_step.clamp_min(1e-30)).all()
    assert (error[1, BLOCK:] < 0.02).all(), "a large number coarsens its own block alone"
    assert (error[0, BLOCK:] > 0).any()


@pytest.mark.parametrize("numbers", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_spoil_their_own_vector_alone(numbers, wrong):
    layer, x = DecodingLinear(nn.Linear(300, 70), numbers), torch.randn(7, 300)
    before = layer(x)
    x[3, 150] = wrong
    after = layer(x)
    assert after[3].isnan().all()  # an infinity would have the sign of a code, which is that of no input
    assert torch.equal(after[[0, 1, 2, 4, 5, 6]], before[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_the_largest_products_do_not_overflow(numbers):
    linear = nn.Linear(3 * BLOCK, 66, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.where(torch.rand_like(linear.weight) < 0.5, -2.0, 2.0))
        linear.weight[:3] = torch.tensor([2.0, -2.0, 2.0]).unsqueeze(1)
        linear.weight[2, 0] = -2.0  # so int4 has two codes
    layer = DecodingLinear(linear, numbers)
    x = torch.cat([torch.full((1, 3 * BLOCK), value) for value in (5.0, -5.0)])
    torch.testing.assert_close(layer(x).double(), by_torch(layer, x), rtol=1e-5, atol=1e-3)


def test_what_the_numbers_keep_of_a_weight():
    linear = nn.Linear(50, 20)
    with torch.no_grad():
        linear.weight[3] = 0.0
    w = linear.weight
    assert DecodingLinear(linear).weight.data_ptr() == w.data_ptr()
    assert torch.equal(DecodingLinear(linear, "bfloat16").weight, w.bfloat16().float())
    error = (DecodingLinear(linear, "int8").weight - w).abs()
    assert (error <= w.abs().amax(1, keepdim=True) / 254 * 1.0001).all()
    assert (error > 0).any()


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (31, 65), (70, 3), (300, 66)])
def test_int4_keeps_each_group_within_some_units(n_in, n_out):
    linear = nn.Linear(n_in, n_out)
    with torch.no_grad():
        linear.weight[0] = 0.25  # a block of one number
        linear.weight[-1, -1] = 30.0  # does not coarsen other outputs, nor other blocks of this one
    w, mine = linear.weight, DecodingLinear(linear, "int4").weight
    for start in range(0, n_in, BLOCK):
        unit = w[:, start : start + BLOCK].abs().amax(1, keepdim=True) / 119 * (1 + 2**-8)
        for group in range(start, min(start + BLOCK, n_in), 32):
            part, kept = w[:, group : group + 32], mine[:, group : group + 32]
            # a step up to 1.5 units below a 15th of the range cuts off both ends, and the minimum is rounded
            assert ((kept - part).abs() <= (1.5 * 15 / 2 + 0.5) * unit).all()
            assert all(len(set(row.tolist())) <= 16 for row in kept)
    if n_in > 1:
        assert not torch.equal(mine, w)


def in_q4_0(weight):
    """Round as llama.cpp's Q4_0 does: 4 bits and a float16 factor for every 32 weights, so 4.5 bits, too."""
    groups = weight.unflatten(1, (-1, 32))
    factor = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    codes = (groups / factor + 8.5).floor().clamp(0, 15)
    return (factor.half().float() * (codes - 8)).flatten(1)


def test_int4_takes_4_and_a_half_bits_and_rounds_less_than_q4_0():
    linear = nn.Linear(256, 128)
    for draw in (nn.init.normal_, nn.init.uniform_, lambda weight: weight.normal_().pow_(3)):
        draw(linear.weight)
        layer = DecodingLinear(linear, "int4")
        assert layer.stored.nbytes * 8 == 4.5 * linear.weight.numel()
        assert (layer.weight - linear.weight).norm() < (in_q4_0(linear.weight) - linear.weight).norm()


def test_int4_of_the_smallest_and_largest_weights_and_of_those_that_are_not_finite():
    linear, x = nn.Linear(128, 4), torch.ones(1, 128)
    for size in (1e-30, 1e30):
        linear.weight.uniform_(-size, size)
        exact = linear.weight.double()
        assert (DecodingLinear(linear, "int4").weight - exact).norm() < 0.1 * exact.norm()
    linear.weight.uniform_(-1, 1)
    linear.weight[1, 5], linear.weight[2, 7] = float("nan"), float("inf")
    assert DecodingLinear(linear, "int4")(x).isfinite().tolist() == [[True, False, False, True]]


def language_model(**options):
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=31, n_layer=2, d_model=24, d_channel_mixing=40, **options)
    return LanguageModel(config).eval()


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_bfloat16_model_is_packed_as_its_float32_copy(numbers, tied):
    shape = {"mixer": ["gru", "gateloop"], "feed_forward": "mixture-of-experts", "tie_embeddings": tied}
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(40, None, 2, 16, 24, **shape)).eval().bfloat16()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed, tokens = pack_linear_layers(model, numbers), torch.randint(40, (2, 5))
    expected = pack_linear_layers(copy.deepcopy(model).float(), numbers)
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens)[0], expected(tokens)[0], rtol=0, atol=0)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dict.fromkeys(kept, torch.bfloat16)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_steps_as_the_model_does(tied):
    model = language_model(tie_embeddings=tied).train()
    packed = pack_linear_layers(model)
    assert model.training
    assert not any(module.training or isinstance(module, nn.Linear) for module in packed.modules())
    assert packed.embedding.weight is model.embedding.weight
    model.eval()
    tokens = torch.randint(31, (2, 12))
    expected, expected_state = model(tokens)
    pieces, state = [], None
    for piece in tokens.split([1, 1, 3, 1, 6], dim=1):
        logits, state = packed(piece, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(state.layers, expected_state.layers):
        torch.testing.assert_close(mine.h, other.h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_packing_in_place_frees_each_weight_before_the_next_is_packed(tied, monkeypatch):
    model = language_model(tie_embeddings=tied)
    expected = pack_linear_layers(copy.deepcopy(model), "int4")
    packed_before, make = [], DecodingLinear.__init__

    def watch(layer, linear, dtype):
        assert not any(weight() is not None for weight in packed_before)
        make(layer, linear, dtype)
        packed_before.extend([weakref.ref(linear.weight)] if type(linear) is nn.Linear else [])

    monkeypatch.setattr(DecodingLinear, "__init__", watch)
    packed, tokens = pack_linear_layers(model, "int4", in_place=True), torch.randint(31, (2, 7))
    assert packed is model
    assert len(packed_before) > 3
    torch.testing.assert_close(packed(tokens)[0], expected(tokens)[0], rtol=0, atol=0)


@pytest.mark.parametrize("mixer", ["gateloop", "mamba", "gated-delta-net", "rotary-attention"])
def test_a_few_tokens_unpack_no_weight(mixer, monkeypatch):
    """To write out a matrix takes as long as to multiply it with many vectors."""
    packed = pack_linear_layers(LanguageModel(LanguageModelConfig(11, None, 1, 16, 16, mixer=mixer)).eval(), "int8")
    monkeypatch.setattr(DecodingLinear, "weight", property(lambda layer: pytest.fail(f"unpacked {layer}")))
    packed(torch.arange(4).unsqueeze(0))


def test_errors():
    linear = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"dtype is 'int2'; expected one of float32, bfloat16, int8, int4"):
        DecodingLinear(linear, "int2")
    with pytest.raises(ValueError, match="dtype is 'fp8'"):
        pack_linear_layers(linear, "fp8")
    with pytest.raises(ValueError, match=r"linear\.weight is float64 \(3, 4\) on cpu; expected float32 or bfloat16 on"):
        DecodingLinear(nn.Linear(4, 3).double())
    with pytest.raises(ValueError, match=r"x is float32 \(2, 5\) on cpu; expected float32 \(\.\.\., 4\)"):
        DecodingLinear(linear)(torch.randn(2, 5))
    with (
        torch.enable_grad(),
        pytest.raises(RuntimeError, match="x is a tensor that requires a gradient; expected one that does not"),
    ):
        DecodingLinear(linear)(torch.randn(2, 4, requires_grad=True))


@pytest.mark.parametrize("numbers", DTYPES)
def test_the_filters_of_hyena_are_not_rounded(numbers):
    """They are fast sines of fast sines: rounded weights would make other filters."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(30, None, 1, 16, 24, mixer="hyena", mixer_options={"window": 9})).eval()
    packed = pack_linear_layers(model, numbers)
    kept = [module for module in model.modules() if isinstance(module, ImplicitFilters)]
    assert kept
    for one, other in zip(kept, (module for module in packed.modules() if isinstance(module, ImplicitFilters))):
        assert torch.equal(one(), other())


def replace_forward(layer):
    layer.forward = lambda x: -type(layer).forward(layer, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        spectral_norm,  # of the older kind, which computes the weight in a hook
        lambda layer: layer.register_forward_hook(lambda *given: -given[-1]),
        replace_forward,
    ],
)
def test_packing_drops_nothing_that_acts_on_calls(change):
    model = LanguageModel(LanguageModelConfig(11, 11, 1, 8, 8, mixer="s5"))
    change(model.head)
    with pytest.raises(ValueError, match=r"^model is one with a hook or another forward on the Linear head; expected"):
        pack_linear_layers(model)


def test_packing_takes_hooks_where_it_replaces_nothing():
    model, tokens = LanguageModel(LanguageModelConfig(11, 11, 1, 8, 8, mixer="s5")).eval(), torch.randint(11, (1, 3))
    model.blocks[0].mixer.register_forward_hook(lambda *given: (-given[-1][0], given[-1][1]))
    torch.testing.assert_close(pack_linear_layers(model)(tokens)[0], model(tokens)[0])
