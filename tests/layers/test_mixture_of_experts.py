"""Mixtures of experts against a plain loop, their losses, and models with them."""

import itertools

import pytest
import torch
from torch.nn import functional
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import load_balancing_loss_func

from recurra._choices import DTYPES
from recurra.decoding.linear import DecodingExperts, DecodingLinear
from recurra.decoding.steps import CompiledStep, prepare
from recurra.layers.experts import Experts, MixtureOfExperts, load_balancing_loss
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors
from recurra.train.config import TrainingConfig
from recurra.train.losses import Objective

KINDS = {
    "plain": {},
    "shared": {"d_shared": 5, "scale": 1.7, "normalise": False},
    "gated": {"d_shared": 4, "shared_gate": True, "d_expert": 9},
    "one": {"top_k": 1, "normalise": False},
    "sigmoid": {"router": "sigmoid", "scale": 0.6},
    "sigmoid alone": {"router": "sigmoid", "normalise": False, "top_k": 3},
    "all": {"top_k": 5},
    "squared": {"expert": "relu-squared", "d_shared": 4, "d_latent": 3},
    "grouped": {"router": "sigmoid", "n_experts": 9, "n_groups": 3, "top_groups": 2, "top_k": 4, "epsilon": 0.5},
}


def mixture(**options) -> MixtureOfExperts:
    torch.manual_seed(0)
    module = MixtureOfExperts(6, 7, **{"n_experts": 5, "top_k": 2, **options}).double()
    if options.get("router") == "sigmoid":
        module.router.bias.normal_(0, 0.3)
    return module


def activated(x, expert):
    gate, up = (x, x) if expert == "relu-squared" else x.chunk(2)
    return gate.clamp_min(0) * up if gate is up else functional.silu(gate) * up


def without_worst_groups(scores, n_groups, top_groups):
    """As DeepSeek-V3 says: the groups whose two best experts have the largest sum remain."""
    groups = scores.view(n_groups, -1)
    worst = groups.sort(1, descending=True).values[:, :2].sum(1).argsort(descending=True)[top_groups:]
    return groups.index_fill(0, worst, -torch.inf).flatten()


def by_a_loop(
    module: MixtureOfExperts,
    x,
    *,
    top_k=2,
    router="softmax",
    normalise=True,
    scale=1.0,
    expert="swiglu",
    epsilon=1e-6,
    n_groups=1,
    top_groups=1,
    **_,
):
    """Token by token; every expert as a network of its own."""
    kind, weights, outputs = expert, dict(module.named_parameters()), []
    for token in x.flatten(0, 1):
        logits, bias = weights["router.weight"] @ token, weights.get("router.bias", 0.0)
        probabilities = logits.softmax(0) if router == "softmax" else logits.sigmoid()
        preferred = without_worst_groups(probabilities + bias, n_groups, top_groups)
        chosen = preferred.argsort(descending=True)[:top_k]
        total = probabilities[chosen].sum() + (epsilon if router == "sigmoid" else 0.0) if normalise else 1.0
        inputs = weights["to_latent.weight"] @ token if "to_latent.weight" in weights else token
        y = torch.zeros_like(inputs)
        for expert in chosen:
            inner = activated(weights["experts.gate_up.weight"][expert] @ inputs, kind)
            y = y + scale * probabilities[expert] / total * (weights["experts.down.weight"][expert] @ inner)
        y = weights["from_latent.weight"] @ y if "from_latent.weight" in weights else y
        if kind == "relu-squared":
            y = y + weights["shared.3.weight"] @ activated(weights["shared.0.weight"] @ token, kind)
        elif module.shared is not None:
            inner = functional.silu(weights["shared.gate.weight"] @ token) * (weights["shared.up.weight"] @ token)
            shared = weights["shared.down.weight"] @ inner
            if "shared_gate.weight" in weights:
                shared = torch.sigmoid(weights["shared_gate.weight"] @ token) * shared
            y = y + shared
        outputs.append(y)
    return torch.stack(outputs).view_as(x)


def gradients(y, module, x):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.autograd.grad((y * weights).sum(), [x, *trained], materialize_grads=True)


@pytest.mark.parametrize("steps", [1, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_loop_over_tokens(kind, steps):
    module, x = mixture(**KINDS[kind]), torch.randn(3, steps, 6, dtype=torch.float64, requires_grad=True)
    y, expected = module(x), by_a_loop(module, x, **KINDS[kind])
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    found = gradients(y, module, x)
    for one, other in zip(found, gradients(expected, module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert KINDS[kind].get("top_k") == 5 or all(gradient.any() for gradient in found)


@pytest.mark.compile
def test_the_same_under_transforms_and_in_a_trace():
    """Weights are gathered under torch.func, and a trace has one operation that chooses at each call."""
    module, (x, other) = mixture(), torch.randn(2, 2, 5, 6, dtype=torch.float64)
    each = torch.func.vmap(module)(x[:, None])[:, 0]
    torch.testing.assert_close(each, module(x), rtol=1e-12, atol=1e-13)
    traced = torch.jit.trace(module, (x,), check_trace=False)
    torch.testing.assert_close(traced(other), module(other), rtol=0, atol=0)
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(other), module(other), rtol=0, atol=0)


@pytest.mark.compile
def test_it_compiles_as_one_graph():
    module, x = mixture(), torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, module(x), rtol=1e-12, atol=1e-13)
    for one, other in zip(gradients(y, module, x), gradients(module(x), module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_no_tokens_and_one_that_is_not_finite():
    module, x = mixture(), torch.randn(1, 4, 6, dtype=torch.float64)
    assert module(x[:, :0]).shape == (1, 0, 6)
    assert all(not gradient.any() for gradient in gradients(module(x[:0]), module, x.requires_grad_()))
    y, spoilt = module(x), x.detach().clone()
    spoilt[:, 2] = torch.nan
    torch.testing.assert_close(module(spoilt)[:, [0, 1, 3]], y[:, [0, 1, 3]], rtol=1e-13, atol=1e-14)


def test_the_load_balancing_loss_is_that_of_transformers():
    module, x = mixture(), torch.randn(2, 9, 6, dtype=torch.float64)
    mask, routing = torch.rand(2, 9) < 0.6, []
    module(x, routing)
    module(x, routing, mask)
    (logits, _, _), (_, _, counted) = routing
    assert torch.equal(counted, mask.flatten())
    whole, part = (load_balancing_loss([one]) for one in routing)
    for found, given in ((whole, None), (part, mask)):
        expected = load_balancing_loss_func((logits,), 5, 2, given).double()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # theirs sums in float32
    torch.testing.assert_close(load_balancing_loss(routing), (whole + part) / 2)
    whole.backward()
    assert module.router.weight.grad.any()
    even = routing[0]._replace(logits=torch.zeros(5, 5), chosen=torch.arange(10).view(5, 2) % 5, mask=None)
    assert load_balancing_loss([even]).item() == pytest.approx(2)


SCALES = {"residual_scale": 0.7, "logit_scale": 0.5}


def config(top_k=2, scales=None, **options) -> LanguageModelConfig:
    shape = {"n_layer": 3, "d_model": 16, "d_channel_mixing": 12, "mixer": "min-gru", "norm": "rms", "biases": False}
    experts = {"n_experts": 6, "top_k": top_k, "d_expert": 10, "d_shared": 7, "shared_gate": True, **options}
    kinds = ["mixture-of-experts", "swiglu", "mixture-of-experts"]
    return LanguageModelConfig(
        vocab_size=20, **shape, feed_forward=kinds, feed_forward_options=experts, **(scales or {})
    )


TOKENS = torch.randint(20, (2, 17), generator=torch.Generator().manual_seed(1))


def test_cuts_and_padding_do_not_matter_to_a_model():
    torch.manual_seed(0)
    model = LanguageModel(config(scales=SCALES)).double()
    expected, last = model(TOKENS)
    pieces, state = [], None
    for piece in TOKENS.split([1, 5, 11], 1):
        y, state = model(piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-13)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :6] = mask[1, 12:] = False
    routing = []
    hidden, _ = model.hidden(TOKENS, mask=mask, routing=routing)
    alone = [[], []]
    for row, seen in enumerate((slice(6, 17), slice(0, 12))):
        found, _ = model.hidden(TOKENS[row : row + 1, seen], routing=alone[row])
        torch.testing.assert_close(hidden[row, mask[row]], found[0], rtol=1e-12, atol=1e-13)
    assert len(routing) == 2
    for whole, *parts in zip(routing, *alone):
        logits = torch.cat([part.logits for part in parts])
        torch.testing.assert_close(whole.logits[whole.mask], logits, rtol=1e-12, atol=1e-13)
    assert "chooses experts" in model.why_not_exportable()


def test_training_minimises_the_balance_too():
    torch.manual_seed(0)
    model, routing = LanguageModel(config()).double(), []
    model.hidden(TOKENS, routing=routing)
    loss, objective, _ = Objective(model, TrainingConfig(balance_penalty=0.25))(TOKENS, TOKENS, TOKENS.numel(), None)
    torch.testing.assert_close(objective - loss, TOKENS.numel() * 0.25 * load_balancing_loss(routing))
    with pytest.raises(ValueError, match=r"balance_penalty is 0\.25; expected 0 but for a model with mixtures of exp"):
        Objective(LanguageModel(LanguageModelConfig(5)), TrainingConfig(balance_penalty=0.25))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_packed_experts_are_packed_layers(dtype, gated):
    """Bit for bit, whatever else is computed beside them; 70 tokens are more than the kernel takes at once."""
    torch.manual_seed(0)
    experts, x = Experts(4, 40, 72, gated=gated), torch.randn(70, 40)
    packed, chosen = DecodingExperts(experts, dtype), torch.rand(70, 4).topk(2).indices
    inner, outer = (
        [DecodingLinear(linear(weights, expert), dtype) for expert in range(4)]
        for weights in (experts.gate_up, experts.down)
    )
    chosen[:, 0] = torch.where(chosen[:, 1] == 3, 0, 3)
    for tokens in (slice(0, 1), slice(0, 5), slice(None)):
        y = packed(x[tokens], chosen[tokens])
        for found, token, numbers in zip(y, x[tokens], chosen[tokens]):
            for one, expert in zip(found, numbers):
                hidden = activated(inner[expert](token), "swiglu" if gated else "relu-squared")
                expected = outer[expert](hidden[None])[0]
                close = 1e-5 if dtype == "float32" else 0.0  # of which torch multiplies many
                torch.testing.assert_close(one, expected, rtol=close, atol=close)


def linear(weights, expert):
    one = torch.nn.Linear(weights.in_features, weights.out_features, bias=False)
    one.weight.copy_(weights.weight[expert])
    return one


CLOSE = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.06, "int4": 0.3}


SQUARED = {"expert": "relu-squared", "d_latent": 9, "router": "sigmoid", "shared_gate": False}
PREPARED = [
    *itertools.product(["float32"], [{}, {"normalise": False, "shared_gate": False}, {"router": "sigmoid"}, SQUARED]),
    *zip(["bfloat16", "int8", "int4"], [{}, SQUARED, {}], strict=True),  # the test above has all kinds of experts
]


@pytest.mark.parametrize(("dtype", "options"), PREPARED, ids=str)
@torch.no_grad()
def test_a_prepared_model_decodes(dtype, options):
    """Rounded inputs may change a choice, and with it the logits: with them all experts are used."""
    torch.manual_seed(0)
    model = LanguageModel(config(top_k=2 if dtype == "float32" else 6, **options)).eval()
    prepared = prepare(model, dtype)
    assert type(prepared) is CompiledStep
    for rows in (1, 3):
        tokens, found, state = torch.randint(20, (rows, 17)), [], None
        for step in tokens.split(1, 1):
            y, state = prepared(step, state)
            found.append(y)
        assert prepared.program(rows) is not None
        expected = model(tokens)[0]
        for y in (torch.cat(found, 1), prepared(tokens)[0]):
            assert (y - expected).norm() < CLOSE[dtype] * expected.norm()
    (_, at_once), (_, state) = prepared(tokens[:1, :9]), prepared(tokens[:1, :5])
    _, in_two = prepared(tokens[:1, 5:9], state)
    assert all(map(torch.equal, tensors(at_once), tensors(in_two)))
    assert prepared.program(64) is None or 64 * model.blocks[0].feed_forward.router.top_k <= 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k is 9; expected at most n_experts = 5"),
        ({"normalise": "no"}, "normalise is 'no'; expected true or false"),
        ({"scale": "a"}, "scale is 'a'; expected a number"),
        ({"shared_gate": True}, "shared_gate is True; expected False with d_shared = 0"),
        ({"scale": 0.0}, "scale is 0.0; expected"),
        ({"expert": "gelu"}, "expert is 'gelu'; expected one of swiglu, relu-squared"),
        ({"epsilon": 1.0}, "epsilon is 1.0; expected 1e-06 with router = 'softmax'"),
        ({"router": "sigmoid", "n_groups": 5}, "n_groups is 5; expected groups of at least 2 of 5 experts"),
        ({"router": "sigmoid", "top_groups": 2}, "top_groups is 2; expected at most n_groups = 1"),
        (
            {"router": "sigmoid", "n_experts": 8, "n_groups": 4, "top_k": 3},
            "top_k is 3; expected at most the 2 experts of",
        ),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        mixture(**options)


def test_shapes_of_models_that_do_not_fit():
    with pytest.raises(ValueError, match=r"feed_forward is .*; expected one name for each of n_layer = 4"):
        LanguageModelConfig(5, feed_forward=["gelu"])
    for wrong in ({"bogus": 4}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match=r"an option in feed_forward_options.*expected one of .*n_experts"):
            LanguageModelConfig(5, feed_forward="mixture-of-experts", feed_forward_options=wrong)
    with pytest.raises(ValueError, match=r"feed_forward_options is .*; expected none without a mixture-of-experts"):
        LanguageModelConfig(5, feed_forward_options={"top_k": 1})
