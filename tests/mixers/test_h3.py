"""H3 against its equations, one step and one number at a time."""

import cmath
import math

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.mixers.h3 import H3

D_MODEL = 4


def by_the_equations(layer: H3, x: torch.Tensor, discretisation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 from zeros: outputs, and the modes after the last step as (H, d, d, n), of one sequence."""
    d, n_heads, taps = layer.head_dim, D_MODEL // layer.head_dim, layer.shift.weight[:, 0]
    q, k, v = (x @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)))
    step, decay = layer.log_step.exp(), layer.log_decay.exp()
    c = torch.view_as_complex(layer.output_weights)
    eigenvalues = torch.complex(-decay, layer.frequency)
    scaled = step[:, None] * eigenvalues
    if discretisation == "zoh":
        a = torch.exp(scaled)
        b = (a - 1) / eigenvalues
    else:
        a = (1 + scaled / 2) / (1 - scaled / 2)
        b = step[:, None] / (1 - scaled / 2)
    h = torch.zeros(n_heads, d, d, a.shape[1], dtype=torch.complex128)
    outputs = []
    for t in range(len(x)):
        key = sum(taps[:, -1 - s] * k[t - s] for s in range(min(t + 1, taps.shape[1]))).view(n_heads, d)
        product = key[:, :, None] * v[t].view(n_heads, 1, d)
        h = a[:, None, None] * h + b[:, None, None] * product[..., None]
        u = 2 * (c[:, None, None] * h).sum(-1).real + layer.skip[:, None, None] * product
        outputs.append(torch.stack([q[t].view(n_heads, d)[i] @ u[i] for i in range(n_heads)]).flatten())
    return layer.output_projection(torch.stack(outputs)), h


@pytest.mark.parametrize("head_dim", [1, 2, 4])
@pytest.mark.parametrize("length", [5, 17])  # stepped and convolved
@pytest.mark.parametrize("options", [{}, {"discretisation": "zoh"}], ids=str)
def test_outputs_state_and_gradients_are_the_papers(head_dim, length, options):
    layer = H3(D_MODEL, d_state=6, head_dim=head_dim, **options).double()
    x = torch.randn(1, length, D_MODEL, dtype=torch.float64, requires_grad=True)
    y, state = layer(x)
    expected, h = by_the_equations(layer, x[0], options.get("discretisation", "bilinear"))
    require_same_gradients((y[0], state.h[0]), (expected, h.flatten(0, 2)), [x, *layer.parameters()], 1e-11)


def test_a_held_mode_is_the_exponential_of_its_step():
    """The reference above and the layer share torch.exp; this is Python's own."""
    layer = H3(D_MODEL, d_state=2, discretisation="zoh").double()
    eigenvalue = complex(-0.5, float(layer.frequency[1, 0].detach()))
    a = cmath.exp(math.exp(float(layer.log_step[1].detach())) * eigenvalue)
    assert abs(complex(layer.ssm().a[1, 0].detach()) - a) < 1e-7


def test_the_state_has_the_last_keys():
    layer = H3(D_MODEL, d_state=6).double()
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    _, state = layer(x)
    torch.testing.assert_close(state.shift, layer.qkv(x)[:, -5:, D_MODEL : 2 * D_MODEL])


def test_it_recalls_the_value_that_followed_a_key():
    """The paper's reason for it: a shift of one step and a sum without decay are an associative memory."""
    layer = H3(4, d_state=2, head_dim=4).double()
    eye = torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.qkv.weight.copy_(eye.repeat(3, 1))
        layer.shift.weight[:, 0, 0] = 1  # the key of the step before
        layer.log_decay.fill_(-60)
        layer.frequency.fill_(1e-30)
        layer.output_weights[..., 0] = 0.5
        layer.output_projection.weight.copy_(eye)
    letters = [0, 3, 1, 2, 0]  # 3 followed 0
    y, _ = layer(eye[letters][None])
    torch.testing.assert_close(y[0, -1], eye[3], rtol=1e-9, atol=1e-9)


def test_heads_of_one_channel_multiply_elementwise():
    """With d heads of size 1 the products are D numbers, with one head of size D they are D^2."""
    assert H3(D_MODEL, d_state=6).initial_state(2).h.shape == (2, 4, 3)
    assert H3(D_MODEL, d_state=6, head_dim=4).initial_state(2).h.shape == (2, 16, 3)
    assert len(H3(D_MODEL, head_dim=2).transition_parameters()) == 3
