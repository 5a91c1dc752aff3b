"""Every mixer works with torch.func (ensembles by vmap, gradients per sequence, forward derivatives), and
torch.autograd can take a batch of gradients through it."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

from recurra.state import tensors

TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def draw(batch: int, length: int, mixer) -> torch.Tensor:
    return torch.randn(batch, length, mixer.d_model, dtype=torch.float64)


def call(mixer, weights, x):
    """Run two pieces of x; return the outputs and the last state's tensors, real ones."""
    half = x.shape[1] // 2
    y, state = functional_call(mixer, weights, (x[:, :half],))
    z, state = functional_call(mixer, weights, (x[:, half:], state))
    return (y, z, *(torch.view_as_real(t) if t.is_complex() else t for t in tensors(state)))


def weights_of(mixer) -> dict[str, torch.Tensor]:
    return {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}


def moved(mixer, by: float = 0.1):
    """A twin with other weights."""
    twin = copy.deepcopy(mixer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)
    return twin


def test_an_ensemble_runs_in_one_call(mixer):
    members = [mixer, moved(mixer), moved(mixer)]
    weights = stack_module_state(members)
    x = draw(2, 6, mixer)
    together = vmap(lambda w, b: call(mixer, {**w, **b}, x))(*weights)
    for number, member in enumerate(members):
        alone = call(mixer, weights_of(member), x)
        torch.testing.assert_close(tuple(t[number] for t in together), alone, **TIGHT)


def test_gradients_of_every_sequence(mixer):
    x, weights = draw(3, 6, mixer), weights_of(mixer)
    weights = {name: weight.detach() for name, weight in weights.items()}
    parameters = {name: weights.pop(name) for name, _ in mixer.named_parameters()}

    def loss(parameters, sequence):
        return sum(t.square().sum() for t in call(mixer, {**parameters, **weights}, sequence[None]))

    together = vmap(grad(loss), (None, 0))(parameters, x)
    for number, sequence in enumerate(x):
        mixer.zero_grad()
        loss(dict(mixer.named_parameters()), sequence).backward()
        alone = {name: p.grad for name, p in mixer.named_parameters()}
        torch.testing.assert_close({name: t[number] for name, t in together.items()}, alone, **TIGHT)


def test_forward_derivatives_are_those_of_the_backward_pass(mixer):
    buffers = dict(mixer.named_buffers())
    inputs = {"x": draw(2, 6, mixer), **{name: p.detach() for name, p in mixer.named_parameters()}}
    direction = {name: torch.randn_like(t) for name, t in inputs.items()}

    def function(inputs):
        return call(mixer, {**{name: t for name, t in inputs.items() if name != "x"}, **buffers}, inputs["x"])

    outputs, tangents = jvp(function, (inputs,), (direction,))
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    expected = function(leaves)
    torch.testing.assert_close(outputs, expected, **TIGHT)
    constant = [t for t, y in zip(tangents, expected) if not y.requires_grad]  # such as a memory of earlier segments
    assert not any(t.any() for t in constant)
    tangents, expected = zip(*((t, y) for t, y in zip(tangents, expected) if y.requires_grad))
    cotangents = tuple(torch.randn_like(t) for t in expected)
    gradients = torch.autograd.grad(expected, list(leaves.values()), cotangents)
    forwards = sum((t * c).sum() for t, c in zip(tangents, cotangents))
    backwards = sum((g * d).sum() for g, d in zip(gradients, direction.values()))
    torch.testing.assert_close(forwards, backwards, **TIGHT)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's loop where its older vmap has no rule
def test_a_batch_of_gradients_is_those_gradients_one_by_one(mixer):
    mixer = mixer.float()  # kernels take float32
    x = draw(2, 6, mixer).float().requires_grad_()
    outputs = [t for t in call(mixer, weights_of(mixer), x) if t.requires_grad]
    cotangents = [torch.randn(3, *t.shape) for t in outputs]
    leaves = [x, *mixer.parameters()]

    def gradients(cotangents, **options):
        return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, **options)

    together = gradients(cotangents, is_grads_batched=True)
    assert not any(t.requires_grad for t in together)  # nobody asked for a graph
    for number in range(3):
        alone = gradients([c[number] for c in cotangents])
        torch.testing.assert_close([t[number] for t in together], [*alone], rtol=1e-4, atol=1e-4)


def test_forward_derivatives_of_a_gradient(mixer):
    """In eager mode, with a backward pass that records nothing: the Hessian times a direction."""
    x = draw(2, 4, mixer)
    direction = torch.randn_like(x)

    def derivative(**options):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), direction)
            total = sum(t.square().sum() for t in call(mixer, weights_of(mixer), dual))
            (found,) = torch.autograd.grad(total, dual, **options)
            return forward_ad.unpack_dual(found).tangent

    try:
        expected, found = derivative(create_graph=True), derivative()
    except NotImplementedError as error:
        if "forward AD with aten::" not in str(error):
            raise
        pytest.skip(f"torch has none: {error}")
    torch.testing.assert_close(found, expected, **TIGHT)
