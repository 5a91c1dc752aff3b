"""DeltaNet and Gated DeltaNet against their equations, written out step by step, and against Qwen3-Next's layer."""

from types import ModuleType

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch import Tensor
from torch.nn import functional

from recurra import delta_rule
from recurra.mixers.delta_net import DeltaNet, DeltaNetState
from recurra.mixers.gated_delta_net import GatedDeltaNet

D_MODEL = 6
OPTIONS = {"n_heads": 2, "d_qk": 8, "d_v": 6}


def draw_state(layer: DeltaNet | GatedDeltaNet, batch: int = 2) -> DeltaNetState:
    return DeltaNetState(*(torch.randn_like(part.double()) for part in layer.initial_state(batch)))


def by_a_loop(layer: DeltaNet | GatedDeltaNet, x: Tensor, state: DeltaNetState) -> tuple[Tensor, DeltaNetState]:
    """S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T with columns; the convolution as a sum over its window."""
    heads, kernel = layer.n_heads, layer.convolution.weight[:, 0]
    s, window, outputs = state.h.mT, state.inputs, []
    for step in x.unbind(1):
        window = torch.cat([window, (step @ layer.qkv.weight.T)[:, None]], 1)
        mixed = torch.einsum("bkc,ck->bc", window, kernel)
        window = window[:, 1:]
        parts = (mixed * torch.sigmoid(mixed)).split([layer.d_qk, layer.d_qk, layer.d_v], -1)
        q, k, v = (part.unflatten(-1, (heads, -1))[..., None] for part in parts)
        q, k = (part / (part.square().sum(-2, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        b = torch.sigmoid(step @ layer.rate_projection.weight.T)[..., None, None] * layer.largest_rate
        s = s @ (torch.eye(k.shape[-2]).double() - b * k @ k.mT)
        if isinstance(layer, GatedDeltaNet):
            size = torch.log(1 + torch.exp(step @ layer.decay_projection.weight.T + layer.dt_bias))
            s = torch.exp(-torch.exp(layer.A_log) * size)[..., None, None] * s
        s = s + b * v @ k.mT
        y = (s @ q)[..., 0] / q.shape[-2] ** 0.5
        y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight).flatten(1)
        if isinstance(layer, GatedDeltaNet):
            gate = step @ layer.gate_projection.weight.T
            y = y * gate * torch.sigmoid(gate)
        outputs.append(y @ layer.output_projection.weight.T)
    return torch.stack(outputs, 1), DeltaNetState(s.mT, window)


@pytest.mark.parametrize("kind", [DeltaNet, GatedDeltaNet])
@pytest.mark.parametrize(("length", "negative"), [(1, False), (3, True), (70, False), (70, True)])
def test_it_is_its_recurrence_outputs_state_and_gradients(kind, length, negative):
    layer = kind(D_MODEL, **OPTIONS, negative_eigenvalues=negative).double()
    torch.nn.init.normal_(layer.norm.weight)
    require_same(layer, by_a_loop, torch.randn(2, length, D_MODEL, dtype=torch.float64), draw_state(layer), 1e-9)


def with_rates(layer: DeltaNet, rates: Tensor) -> Tensor:
    """Draw inputs for which b is 0 or the largest rate, as `rates` (L) says: the first channel decides.

    Queries and keys come from the step alone and are the same; the second channel keeps them away from 0.
    """
    n = layer.d_qk
    with torch.no_grad():
        layer.rate_projection.weight.zero_()[:, 0] = 100
        layer.qkv.weight[n : 2 * n, 1] = 3
        layer.qkv.weight[:n] = layer.qkv.weight[n : 2 * n]
        layer.convolution.weight[: 2 * n] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    x = torch.randn(2, len(rates), D_MODEL, dtype=torch.float64)
    x[..., 0] = torch.where(rates.bool(), 1.0, -1.0)
    x[..., 1] = 1
    return x


def test_a_rate_of_zero_keeps_the_state_and_one_replaces_the_keys_value():
    layer = DeltaNet(D_MODEL, **OPTIONS).double()
    state = draw_state(layer)
    assert torch.allclose(layer(with_rates(layer, torch.zeros(9)), state)[1].h, state.h)
    x, start = with_rates(layer, torch.ones(9)), DeltaNetState(state.h, torch.zeros_like(state.inputs))
    values = functional.silu(layer.convolution(layer.qkv(x))[0])[..., 16:].unflatten(-1, (2, 3))
    # q = k, so the output is the value that the key has
    expected = layer.output_projection(layer.norm(values / 2).flatten(-2))  # sqrt(d_k) = 2
    torch.testing.assert_close(layer(x, start)[0], expected, rtol=1e-4, atol=1e-4)


def test_with_negative_eigenvalues_it_counts_modulo_2():
    """With values of 0 a step of b = 2 is -1 along its key, and the sign of the state is a parity."""
    layer = DeltaNet(D_MODEL, n_heads=1, d_qk=1, d_v=1, negative_eigenvalues=True).double()
    with torch.no_grad():
        layer.qkv.weight[2] = 0
    bits = torch.randint(2, (120,))
    state = DeltaNetState(torch.ones(2, 1, 1, 1).double(), torch.zeros(2, 3, 3).double())
    for n in (1, 7, 120):
        _, last = layer(with_rates(layer, bits[:n]), state)
        assert torch.equal(last.h.sign(), torch.full_like(last.h, (-1) ** int(bits[:n].sum())))
        assert last.h.abs().min() > 0.999


def test_weights_are_the_published_ones_and_nothing_has_a_bias():
    assert {name: tuple(p.shape) for name, p in DeltaNet(8).named_parameters()} == {
        "qkv.weight": (24, 8),
        "convolution.weight": (24, 1, 4),
        "rate_projection.weight": (4, 8),
        "norm.weight": (2,),
        "output_projection.weight": (8, 8),
    }


def test_shared_queries_and_keys_are_those_of_as_many_equal_heads():
    """The parts of the wider layer's q and k are repeated, two heads of values each."""
    options = {"n_heads": 4, "d_v": 8, "norm_epsilon": 0.1}
    layer = GatedDeltaNet(D_MODEL, **options, d_qk=6, n_qk_heads=2).double()
    wide = GatedDeltaNet(D_MODEL, **options, d_qk=12).double()
    weights = dict(layer.state_dict())
    for name in ("qkv.weight", "convolution.weight"):
        q, k, v = weights[name].split([6, 6, 8])
        q, k = (part.unflatten(0, (2, 3)).repeat_interleave(2, 0).flatten(0, 1) for part in (q, k))
        weights[name] = torch.cat([q, k, v])
    wide.load_state_dict(weights)
    x = torch.randn(2, 70, D_MODEL, dtype=torch.float64)
    (y, state), (expected, other) = layer(x), wide(x)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state.h, other.h, rtol=1e-11, atol=1e-12)
    assert layer.norm.epsilon == 0.1


@pytest.fixture(scope="module")
def qwen() -> ModuleType:
    return pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="needs the extra hf: pip install recurra[hf]"
    )


def test_it_is_the_layer_of_qwen3_next(qwen):
    heads, d_k, d_v, d_model = 3, 4, 5, 8
    config = qwen.Qwen3NextConfig(
        hidden_size=d_model, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-5,
        linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=d_k, linear_value_head_dim=d_v,
    )  # fmt: skip
    theirs = qwen.Qwen3NextGatedDeltaNet(config, 0)
    layer = GatedDeltaNet(d_model, n_heads=heads, d_qk=heads * d_k, d_v=heads * d_v)
    with torch.no_grad():
        of_heads = theirs.in_proj_qkvz.weight.unflatten(0, (heads, -1)).split([d_k, d_k, d_v, d_v], 1)
        *qkv, gate = (part.flatten(0, 1) for part in of_heads)
        layer.qkv.weight.copy_(torch.cat(qkv))
        layer.gate_projection.weight.copy_(gate)
        rate, decay = theirs.in_proj_ba.weight.unflatten(0, (heads, 2)).unbind(1)
        layer.rate_projection.weight.copy_(rate)
        layer.decay_projection.weight.copy_(decay)
        layer.convolution.weight.copy_(theirs.conv1d.weight)
        for mine, other in (
            (layer.A_log, theirs.A_log),
            (layer.dt_bias, theirs.dt_bias),
            (layer.norm.weight, theirs.norm.weight.normal_()),
            (layer.output_projection.weight, theirs.out_proj.weight),
        ):
            mine.copy_(other)
    for length in (1, 9, 70):
        x = torch.randn(2, length, d_model)
        torch.testing.assert_close(layer(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 70])
def test_the_operator_is_that_of_qwen3_next(qwen, length):
    q, k = torch.randn(2, 2, length, 3, 8)
    v, k = torch.randn(2, length, 3, 6), functional.normalize(k, dim=-1)
    a, b = torch.rand(2, 2, length, 3)
    state = torch.randn(2, 3, 8, 6)
    expected = delta_rule(q * 8**-0.5, k, v, a, b, state)
    options = {"g": a.log(), "beta": b, "initial_state": state, "output_final_state": True}
    for function in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        torch.testing.assert_close(function(q, k, v, **options), expected, rtol=1e-4, atol=1e-4)


def test_without_decay_it_is_delta_net_behind_a_gate():
    layer, plain = GatedDeltaNet(D_MODEL, **OPTIONS).double(), DeltaNet(D_MODEL, **OPTIONS).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 20, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.dt_bias.fill_(-60)  # a = 1
        plain.output_projection.weight.copy_(torch.eye(D_MODEL))
        y = plain(x)[0] * functional.silu(layer.gate_projection(x))
    torch.testing.assert_close(layer(x)[0], layer.output_projection(y), rtol=1e-9, atol=1e-10)


def test_a_decay_of_zero_forgets_everything():
    layer = GatedDeltaNet(D_MODEL, **OPTIONS).double()
    with torch.no_grad():
        layer.A_log.fill_(10)
        layer.dt_bias.fill_(10)
    x, state = torch.randn(2, 5, D_MODEL, dtype=torch.float64), draw_state(layer)
    assert layer.transition(x)[0].eq(0).all()
    of_zeros = state._replace(h=torch.zeros_like(state.h))
    torch.testing.assert_close(layer(x, state)[0], layer(x, of_zeros)[0], rtol=0, atol=0)
    assert torch.linalg.matrix_rank(layer(x, state)[1].h).eq(1).all()  # one step's keys and values


def test_decays_start_in_the_published_range():
    layer = GatedDeltaNet(64, n_heads=512, d_qk=512)
    rates, steps = layer.A_log.exp(), functional.softplus(layer.dt_bias)
    assert 0 < rates.min() < 0.2
    assert 15.8 < rates.max() <= 16.001
    assert 0.00099 < steps.min() < 0.0011
    assert 0.09 < steps.max() < 0.1001


@pytest.mark.parametrize(("d_model", "d_qk"), [(2048, 1536), (64, 48), (12, 6), (1, 6)])
def test_sizes_are_the_published_ones(d_model, d_qk):
    with torch.device("meta"):
        layer = GatedDeltaNet(d_model)
    assert (layer.n_heads, layer.d_qk, layer.d_v) == (6, d_qk, 2 * d_qk)
    assert layer.state_layout.h.shape == (6, d_qk // 6, d_qk // 3)
