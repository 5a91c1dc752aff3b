"""Gradients between segments against torch's own Jacobians of the whole model."""

from functools import reduce
from itertools import pairwise

import pytest
import torch
from torch.autograd.functional import jacobian

from recurra.analysis.gradient_flow import GradientFlow, measure_gradient_flow
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY, N, SEGMENTS, WIDTH = 11, 3, 4, 6
T = N * (SEGMENTS - 1)
CASES = [("gru", "rnn-gru"), ("ncgru", "rnn-ncgru"), ("gru", "relative")]
SHAPE = {"vocab_size": VOCABULARY, "segment_length": N, "n_layer": 2, "d_model": WIDTH, "n_heads": 2}


def make(memory: str = "gru", position: str = "rnn-gru", scale: float = 2.0, **options) -> CompactRecurrentTransformer:
    """A model in float64 whose memory RNN has large weights, as after training."""
    shape = {**SHAPE, "d_channel_mixing": 9, "dropout": 0.3, "memory": memory, "position": position, **options}
    model = CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**shape)).double()
    if memory != "none":
        cell = model.memory.rnn.cell
        with torch.no_grad():
            for parameter in (cell.gate_weight, cell.input_weight, cell.bias):
                parameter *= scale
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, N * SEGMENTS), generator=torch.Generator().manual_seed(1))


def outputs(model: CompactRecurrentTransformer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().hidden(tokens)[0][0]


def by_all_paths(model: CompactRecurrentTransformer, tokens: torch.Tensor, flow: GradientFlow) -> list:
    """dy_k/dy_i for every k and i: what autograd says of the last block's outputs, row by row."""
    segments = []
    hook = model.blocks[-1].register_forward_hook(lambda module, given, result: segments.append(result[0]))
    y = model.eval().hidden(tokens)[0][0]
    hook.remove()
    matrices = []
    for k in flow.targets.tolist():
        rows = [torch.autograd.grad(y_kc, segments[:-1], retain_graph=True) for y_kc in y[k]]
        rows = torch.stack([torch.cat([of_segment[0, -N:] for of_segment in row]) for row in rows])
        matrices.append([rows[:, i] for i in flow.sources.tolist()])
    return matrices


def last_output(model: CompactRecurrentTransformer, tokens: torch.Tensor, m: torch.Tensor, k: int) -> torch.Tensor:
    """y_k as a function of the memory at the start of its segment."""
    m = m[None]
    state = model.initial_state(1)._replace(memory=m, reading=m, placing=model.position.start(m))
    return model.hidden(tokens[:, T:], state)[0][0, k - T]


def memory_states(model: CompactRecurrentTransformer, y: torch.Tensor) -> list[torch.Tensor]:
    """h before the first output, and after each."""
    states = [torch.zeros(1, WIDTH).double()]
    for y_t in y:
        states.append(model.memory.rnn.cell(y_t[None], states[-1]).detach())
    return states


def along_the_rnn(model: CompactRecurrentTransformer, tokens: torch.Tensor, flow: GradientFlow) -> list:
    """The products of CRT eq. (12), factor by factor."""
    cell, y = model.memory.rnn.cell, outputs(model, tokens)
    h = memory_states(model, y[:T])
    reading = [jacobian(lambda y_i, i=i: cell(y_i[None], h[i])[0], y[i]) for i in range(T)]
    passing_on = [jacobian(lambda before, t=t: cell(y[t : t + 1], before[None])[0], h[t][0]) for t in range(T)]
    matrices = []
    for k in flow.targets.tolist():
        last = jacobian(lambda m, k=k: last_output(model, tokens, m, k), h[T][0])
        matrices.append([last @ product_of(passing_on[i + 1 :]) @ reading[i] for i in flow.sources.tolist()])
    return matrices


def product_of(factors: list[torch.Tensor]) -> torch.Tensor:
    """The later factors stand to the left."""
    return reduce(lambda product, factor: factor @ product, factors, torch.eye(WIDTH).double())


def norm(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix)[0]


def norms(of, model, tokens, flow: GradientFlow) -> torch.Tensor:
    return torch.stack([torch.stack([norm(matrix) for matrix in row]) for row in of(model, tokens, flow)])


@pytest.mark.parametrize(("memory", "position"), CASES)
def test_every_norm_is_that_of_torch_s_jacobian(tokens, memory, position):
    model = make(memory, position)
    flow = measure_gradient_flow(model, tokens, at=(0, -1))
    assert flow.sources.tolist() == list(range(T))
    assert flow.targets.tolist() == [T, T + N - 1]
    assert flow.distances[:, [0, -1]].tolist() == [[T, 1], [T + N - 1, N]]
    torch.testing.assert_close(flow.total, norms(by_all_paths, model, tokens, flow), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flow.direct, norms(along_the_rnn, model, tokens, flow), rtol=1e-10, atol=1e-12)


def test_theorem_3_is_the_whole_derivative_from_the_segment_before_alone(tokens):
    flow = measure_gradient_flow(make(), tokens, at=range(N))
    before = flow.sources >= T - N
    torch.testing.assert_close(flow.total[:, before], flow.direct[:, before], rtol=1e-10, atol=0)
    assert ((flow.total / flow.direct - 1)[:, ~before].abs() > 1e-4).all()


@pytest.mark.parametrize(("memory", "position"), CASES)
def test_steps_against_the_cell(tokens, memory, position):
    model = make(memory, position)
    steps = measure_gradient_flow(model, tokens).steps
    cell, y = model.memory.rnn.cell, outputs(model, tokens)
    h = memory_states(model, y[:T])
    by_state = [norm(jacobian(lambda before, t=t: cell(y[t : t + 1], before)[0], h[t])[:, 0]) for t in range(T)]
    by_input = [norm(jacobian(lambda y_t, t=t: cell(y_t[None], h[t])[0], y[t])) for t in range(T)]
    torch.testing.assert_close(steps.norms, torch.stack(by_state), rtol=1e-10, atol=0)
    torch.testing.assert_close(steps.input_norms, torch.stack(by_input), rtol=1e-10, atol=0)
    torch.testing.assert_close(steps.bounds, steps.alpha + steps.beta * steps.candidate_norm)
    assert (steps.norms <= steps.bounds).all()
    assert (steps.bounds <= steps.bound_a_priori).all()


@pytest.mark.parametrize("scale", [0.3, 20.0])
@pytest.mark.parametrize("memory", ["gru", "ncgru"])
def test_bounds_stand_in_order_above_the_direct_chain(tokens, memory, scale):
    flow = measure_gradient_flow(make(memory, scale=scale), tokens, at=range(N))
    chain = (
        flow.direct.log10(),
        flow.log10_bound_measured,
        flow.log10_bound,
        flow.log10_bound_of_largest,
        flow.log10_bound_a_priori,
    )
    for lower, upper in pairwise(chain):
        assert (lower <= upper + 1e-10).all()


def test_bounds_by_hand(tokens):
    flow = measure_gradient_flow(make(), tokens, at=[1])
    i, steps = 4, flow.steps
    ends = float(flow.memory_norms[0] * steps.input_norms[i])
    later = steps.bounds[i + 1 :]
    a_priori = steps.bound_a_priori ** len(later)
    assert len(later) == T - 1 - i
    for bound, factor in (
        (flow.log10_bound_measured, float(steps.norms[i + 1 :].prod())),
        (flow.log10_bound, float(later.prod())),
        (flow.log10_bound_of_largest, float(later.max()) ** len(later)),
        (flow.log10_bound_a_priori, a_priori),
    ):
        assert 10 ** float(bound[0, i]) == pytest.approx(ends * factor, rel=1e-10)


def test_with_open_gates_and_an_orthogonal_matrix_the_ends_alone_bound_the_gradient(tokens):
    """CRT (3), CRT (14): every factor in between is 1."""
    model = make("ncgru", scale=1.0)
    cell = model.memory.rnn.cell
    with torch.no_grad():
        cell.gate_weight.zero_()
        cell.bias[: 2 * WIDTH] = 40
        cell.input_weight[: 2 * WIDTH] = 0
    flow = measure_gradient_flow(model, tokens, at=range(N))
    ends = flow.memory_norms[:, None] * flow.steps.input_norms
    torch.testing.assert_close(10**flow.log10_bound, ends, rtol=1e-10, atol=0)
    assert (flow.direct <= ends * (1 + 1e-10)).all()


def test_a_stream_that_goes_on(tokens):
    """Measuring from the second segment, with the state after the first, gives the same numbers."""
    model = make()
    whole = measure_gradient_flow(model, tokens)
    state = model.eval().hidden(tokens[:, :N])[1]
    rest = measure_gradient_flow(model, tokens[:, N:], state)
    torch.testing.assert_close(rest.total, whole.total[:, N:], rtol=1e-10, atol=0)
    torch.testing.assert_close(rest.direct, whole.direct[:, N:], rtol=1e-10, atol=0)
    torch.testing.assert_close(rest.steps.alpha, whole.steps.alpha[N:], rtol=1e-10, atol=0)
    assert not torch.allclose(measure_gradient_flow(model, tokens[:, N:]).total, rest.total, rtol=1e-3)


def test_the_model_stays_as_it_was(tokens):
    model = make().float()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with torch.no_grad():
        flow = measure_gradient_flow(model, tokens)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    for values in (flow.total, flow.direct, flow.log10_bound, flow.steps.norms, flow.steps.alpha):
        assert values.dtype == torch.float64
        assert not values.requires_grad


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_nothing_falls_back_to_a_loop(tokens):
    """torch warns if an operator has no rule for many vectors at once."""
    for memory, position in CASES:
        for norm_place in ("pre", "post"):
            measure_gradient_flow(make(memory, position, norm=norm_place), tokens)


def test_models_without_a_memory_vector_are_refused(tokens):
    model = TransformerXL(TransformerXLConfig(**SHAPE, d_channel_mixing=9, mem_len=3))
    with pytest.raises(
        ValueError, match=r"model is a TransformerXL; expected one with a memory vector .* `experiment: text-crt`"
    ):
        measure_gradient_flow(model, tokens)
    with pytest.raises(
        ValueError, match=r"with memory 'none'; expected one with a memory .* `model.memory: gru` or `ncgru`"
    ):
        measure_gradient_flow(make("none"), tokens)


@pytest.mark.parametrize("shape", [(1, N), (1, 2 * N + 1), (1, 0), (2, 2 * N)])
def test_anything_but_whole_segments_of_one_stream_is_refused(shape):
    with pytest.raises(
        ValueError, match=rf"tokens is int64 \({shape[0]}, {shape[1]}\) on cpu; expected one stream of two or more"
    ):
        measure_gradient_flow(make(), torch.zeros(shape, dtype=torch.int64))
