"""Functions with a kernel for each pass: outputs and all gradients are those of their references in plain torch."""

import pytest
import torch

from recurra import gate_loop
from recurra.layers.convolution import _shifted_products_reference, shifted_products
from recurra.layers.cross_entropy import _cross_entropy_reference, cross_entropy
from recurra.layers.features import LOWEST, _positive_features_reference, positive_features
from recurra.layers.norms import RMSNorm, _gated_reference, gated
from recurra.layers.positions import _turned_reference, rotate, turned
from recurra.ops.cells.gru import (
    GRUCell,
    HiddenWeights,
    RecurrentWeights,
    gru_after,
    gru_after_reference,
    gru_sequence,
    gru_sequence_reference,
)
from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence, slstm_sequence_reference


def slstm(function):
    def call(projected, weights, c, n, m, h):
        y, last = function(projected, weights, SLSTMParts(c, 1 + n.abs(), m, h))
        return y, *last

    return call


def features(function, start=0.0):
    return lambda q, k, less: function(q, k, less, torch.full_like(q[:, 0], start))


def heads(batch, length, n_heads, *sizes):
    return [(batch, length, n_heads, *([size] if size else [])) for size in sizes]


def products(batch, length, channels, kernel_size, bias=True):
    shapes = [(batch, length, channels), (batch, kernel_size - 1, channels), (kernel_size, channels), (channels,)]
    return shapes if bias else shapes[:3]


def gating(function, norm=None, after=False):
    """y, z, and u and its skip, and the weight of a norm if there are such."""

    def call(y, z, *others):
        skip, weight = (others[:2], others[2:]) if len(others) > 1 else (None, others)
        if norm is None:
            return (function(y, z, skip=skip),)
        layer = RMSNorm(*norm)
        del layer.weight
        layer.weight = weight[0]
        return (function(y, z, layer, skip=skip, after=after),)

    return call


def gated_by_reference(y, z, norm=None, *, skip=None, after=False):
    options = (0, y.shape[-1], 0, 0.0)
    if norm is not None:
        options = (1 + after, len(norm.weight) // norm.n_groups, 0, norm.epsilon)
    return _gated_reference(y, z, *(skip or (None, None)), None if norm is None else norm.weight, *options)


def gate_shapes(batch, length, channels, *norm, skip=True):
    steps = (batch, length, channels)
    return [steps, steps, *([steps, (channels,)] if skip else []), *((n,) for n in norm)]


# The function, its reference, and the shapes of the inputs that have gradients; vectors have 16 or 64 numbers, and 1.
CASES = {
    "turned": (turned, _turned_reference, [
        heads(*sizes[:3], sizes[3], sizes[3], sizes[4], 1)
        for sizes in ((2, 4, 2, 6, 2), (1, 1, 1, 2, 1), (3, 2, 3, 16, 8), (2, 13, 1, 40, 17), (2, 3, 2, 38, 9))
    ]),
    "positive features": (
        features(positive_features), features(_positive_features_reference),
        [heads(2, 4, 2, 5, 5, 0), heads(1, 1, 1, 1, 1, 0), heads(3, 2, 3, 16, 16, 0), heads(2, 13, 1, 38, 38, 0)],
    ),
    "positive features from the start": (
        features(positive_features, LOWEST), features(_positive_features_reference, LOWEST),
        [heads(1, 9, 2, 5, 5, 0), heads(2, 13, 1, 17, 17, 0)],
    ),
    "shifted products": (
        lambda *x: (shifted_products(*x),), lambda *x: (_shifted_products_reference(*x),),
        [products(2, 4, 5, 3), products(1, 1, 1, 1), products(3, 9, 16, 2), products(2, 13, 70, 4)],
    ),
    "shifted products without a bias": (
        lambda *x: (shifted_products(*x, None),), lambda *x: (_shifted_products_reference(*x, None),),
        [products(2, 5, 129, 3, bias=False)],
    ),
    "shifted products and SiLU": (
        lambda *x: (shifted_products(*x, silu=True),), lambda *x: (_shifted_products_reference(*x, silu=True),),
        [products(2, 4, 5, 3), products(1, 1, 1, 1), products(2, 13, 70, 4)],
    ),
    "gate": (
        gating(gated), gating(gated_by_reference),
        [gate_shapes(2, 4, 5), gate_shapes(1, 1, 1), gate_shapes(2, 70, 21), gate_shapes(3, 2, 16, skip=False)],
    ),
    "gate after the norms of heads": (
        gating(gated, (19, 0.1)), gating(gated_by_reference, (19, 0.1)),
        [gate_shapes(2, 4, 57, 19, skip=False), gate_shapes(1, 65, 19, 19)],
    ),
    "gate before the norms of groups": (
        gating(gated, (38, 0.1, 2), after=True), gating(gated_by_reference, (38, 0.1, 2), after=True),
        [gate_shapes(2, 4, 38, 38), gate_shapes(3, 30, 38, 38, skip=False)],
    ),
    "sLSTM": (
        slstm(slstm_sequence), slstm(slstm_sequence_reference),
        [
            [(batch, length, 4, n, d), (n, d, 4 * d), *[(batch, n, d)] * 4]
            for batch, length, n, d in (
                *((2, 4, 2, 3), (1, 1, 1, 2), (3, 1, 3, 4)), *((2, 13, 1, 7), (17, 3, 2, 6), (8, 5, 2, 33)),
            )
        ],
    ),
    "GRU": (
        lambda p, h, *w: gru_sequence(GRUCell(1, 3), p, h, RecurrentWeights(*w)),
        lambda p, h, *w: gru_sequence_reference(GRUCell(1, 3), p, h, RecurrentWeights(*w)),
        [[(2, 4, 9), (2, 3), (6, 3), (3, 3)]],
    ),
    "GRU, reset after": (
        lambda p, h, *w: gru_after(p, h, HiddenWeights(*w)),
        lambda p, h, *w: gru_after_reference(p, h, HiddenWeights(*w)),
        # rows below, at and beyond the five that go together
        [
            [(batch, length, 3 * d), (batch, d), (3 * d, d), (3 * d,)]
            for batch, length, d in ((2, 4, 3), (1, 1, 1), (1, 9, 5), (4, 3, 16), (5, 2, 17), (6, 13, 7), (13, 3, 65))
        ],
    ),
    "cross-entropy": (
        lambda x: (cross_entropy(x, torch.arange(len(x))),),
        lambda x: (_cross_entropy_reference(x, torch.arange(len(x))),),
        [[(5, 9)]],
    ),
    "GateLoop in chunks": (
        lambda q, k, v, a: gate_loop(q, k, v, a.sigmoid(), mode="chunk"),
        lambda q, k, v, a: gate_loop(q, k, v, a.sigmoid(), mode="recurrent"),
        [heads(1, 40, 2, 5, 5, 5, 1)],
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    *functions, shapes = CASES[request.param]
    return functions, [torch.randn(shape).requires_grad_() for shape in shapes[0]]


def loss_of(outputs):
    return sum((torch.arange(x.numel()).sin().view_as(x) * x).sum() for x in outputs if x.requires_grad)


def require_near(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, scale))


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_reference(name):
    *functions, all_shapes = CASES[name]
    for shapes in all_shapes:
        inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        found, expected = (function(*inputs) for function in functions)
        require_near(found, expected)
        assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
        for used in (slice(None), slice(1), slice(1, 2)):
            if any(y.requires_grad for y in found[used]):
                losses = loss_of(found[used]), loss_of(expected[used])
                options = {"retain_graph": True, "materialize_grads": True}
                require_near(*(torch.autograd.grad(loss, inputs, **options) for loss in losses))


def test_what_needs_no_gradient_gets_none(case):
    functions, inputs = case
    for frozen in inputs if len(inputs) > 1 else ():
        frozen.requires_grad_(False)
        leaves = [x for x in inputs if x.requires_grad]
        require_near(*(torch.autograd.grad(loss_of(f(*inputs)), leaves, materialize_grads=True) for f in functions))
        frozen.requires_grad_()


def test_second_derivatives(case):
    functions, inputs = case
    found = []
    for function in functions:
        loss = loss_of(x.sin() for x in function(*inputs))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)))
    require_near(*found)


def test_autocast_leaves_the_way_to_second_derivatives_exact(case):
    """Gradients that are differentiated again go through plain torch, whose products must not become bfloat16."""
    (function, _), inputs = case
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(x.sin() for x in function(*inputs))
        once = torch.autograd.grad(loss, inputs[:2], retain_graph=True)  # those of weights are products in bfloat16
        again = torch.autograd.grad(loss, inputs[:2], create_graph=True)
    require_near(again, once)


def test_a_batch_of_gradients(case):
    (function, _), inputs = case
    y = function(*inputs)[0]
    several = torch.randn(3, *y.shape)
    options = {"retain_graph": True, "materialize_grads": True}
    backward = lambda gradient: torch.autograd.grad(y, inputs, gradient, **options)  # noqa: E731
    found = torch.func.vmap(backward)(several)
    for i, gradient in enumerate(several):
        require_near([one[i] for one in found], backward(gradient))


@pytest.mark.parametrize("name", ["turned", "shifted products", "gate", "gate before the norms of groups"])
def test_layouts_other_than_dense(name):
    *functions, (shapes, *_) = CASES[name]
    inputs = [torch.randn(*shape, 2)[..., 0].requires_grad_() for shape in shapes]
    results = []
    for function in functions:
        found = function(*inputs)
        results.append((*found, *torch.autograd.grad(loss_of(found), inputs)))
    require_near(*results)


def test_the_first_pairs_turn_and_the_others_stay():
    b, c, angles, scale = (torch.randn(2, 3, 2, size) for size in (22, 22, 9, 1))
    found = turned(b, c, angles, scale)
    torch.testing.assert_close(found.c[..., :18], rotate(c[..., :18], angles))
    assert torch.equal(found.c[..., 18:], c[..., 18:])
    torch.testing.assert_close((found.b * found.c).sum(-1, keepdim=True), scale * found.dots, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_negated_later():
    """As the imaginary part of a conjugate is: what lies at their address has the other sign."""
    b, c, angles, scale = (torch.randn(1, 2, 1, size) for size in (4, 4, 2, 1))
    inputs, gradient = [torch._neg_view(b).requires_grad_(), torch._neg_view(c), angles, scale], torch._neg_view(b)
    results = []
    for function in (turned, _turned_reference):
        found = function(*inputs)
        results.append([*found, *torch.autograd.grad(found.b, inputs[:1], gradient)])
    require_near(*results)


@pytest.mark.parametrize("size", [5, 21])
def test_large_exponents_stay_finite_and_a_nan_stays_in_its_feature(size):
    (q, k), less, start = torch.randn(2, 2, 9, 2, size), torch.rand(2, 9, 2), torch.randn(2, 2, size)
    found, expected = (f(600 * q, 600 * k, less, start) for f in (positive_features, _positive_features_reference))
    for one, other in zip(found, expected):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert max(x.max() for x in found[:3]) <= 1
    k[0, 2, 0, size - 1] = torch.nan
    for one, other in zip(positive_features(q, k, less, start), _positive_features_reference(q, k, less, start)):
        assert torch.equal(one.isnan(), other.isnan())
        assert one.isnan().any()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("channels", [5, 38])
def test_bfloat16_inputs_are_rounded_once_on_their_way_out(channels, silu):
    """All else is float32: what comes from bfloat16 is as exact, and gradients that go there are off by half a bit."""
    x, *others = [torch.randn(shape).requires_grad_() for shape in products(2, 9, channels, 3)]
    y, u, scale = (torch.randn(shape).requires_grad_() for shape in ((2, 9, channels), (2, 9, channels), channels))
    x = x.detach().bfloat16().requires_grad_()
    pairs = [
        (shifted_products(x, *others, silu), _shifted_products_reference(x.float(), *others, silu), [x, *others]),
        (gated(y, x, skip=(u, scale)), gated_by_reference(y, x.float(), skip=(u, scale)), [y, x, u, scale]),
    ]
    for found, expected, inputs in pairs:
        weights = torch.randn_like(expected).bfloat16().float()
        results = [
            [one, *torch.autograd.grad((one.float() * weights).sum(), inputs, retain_graph=True)]
            for one in (found, expected)
        ]
        for one, other in zip(*results):
            assert one.dtype in (other.dtype, torch.bfloat16)
            half_a_bit = 2**-8 if one.dtype == torch.bfloat16 else 0
            torch.testing.assert_close(one.float(), other.float(), rtol=2 * half_a_bit + 1e-5, atol=2e-5)


def test_a_state_and_weights_that_are_negated_later():
    x, state, weight = torch.randn(2, 5, 7), torch.randn(2, 2, 7), torch.randn(3, 7)
    found = shifted_products(x, torch._neg_view(state), torch._neg_view(weight), None)
    torch.testing.assert_close(found, shifted_products(x, -state, -weight, None))


def test_a_gate_whose_norm_fits_no_part_of_the_channels_is_refused():
    with pytest.raises(ValueError, match="channels of norm is 5; expected a divisor of 12"):
        gated(torch.randn(2, 5, 12), torch.randn(2, 5, 12), RMSNorm(5))
