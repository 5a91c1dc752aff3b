"""Instructions one at a time, on memory of any strides, against torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decoding.test_linear import by_torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recurra.decoding import _program
from recurra.decoding._instructions import PAST, UPDATE, Instruction
from recurra.decoding._program import StepProgram, _LoweredStep
from recurra.decoding.linear import DTYPES, DecodingLinear
from recurra.decoding.memory import StepMemory, StepNotCompiled


def run(memory, inputs=(), outputs=(), again=None):
    """Run what was written, once with the recorded inputs or with others like them."""
    step = _LoweredStep(memory.instructions, memory.workspace(), list(inputs), list(outputs))
    return StepProgram(step).run(list(again or inputs))


def strided(draw, shape):
    """A tensor of a shape whose strides are in another order, with gaps, or 0."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = torch.randn([shape[d] * steps[d] for d in order])[tuple(slice(None, None, steps[d]) for d in order)]
    tensor = whole.permute([order.index(d) for d in range(len(shape))])
    for d in range(len(shape)):
        if draw(st.booleans()) and draw(st.booleans()):
            tensor = tensor.narrow(d, 0, 1)
    return tensor


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_map_follows_any_strides(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 17, 33]), min_size=0, max_size=3))
    a, b = strided(data.draw, shape), strided(data.draw, shape)
    whole = torch.zeros([2 * size for size in shape])
    out = whole[tuple(slice(None, None, 2) for _ in shape)] if data.draw(st.booleans()) else torch.zeros(shape)
    memory = StepMemory([])
    memory.constant(a), memory.constant(b), memory.keep(out)
    memory.map("sub", out, a, b)
    run(memory)
    assert torch.equal(out, (a - b).expand(shape))
    if out.data_ptr() == whole.data_ptr():
        assert whole.count_nonzero() == out.count_nonzero()  # nothing between was written


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_maps_are_repeated_in_turn(turns):
    """Running sums, with the maps before and after them."""
    x = torch.arange(33.0 * 6).view(6, 33)
    memory, sums, out = StepMemory([]), torch.zeros(6, 33), torch.zeros(6, 33)
    memory.constant(x), memory.keep(sums), memory.keep(out)
    double, row = memory.scratch(x.shape), memory.scratch((33,))
    memory.map("add", double, x, x)
    memory.map("copy", sums[0], double[0])

    def add(turn):
        memory.map("add", row, sums[turn], double[turn + 1])
        memory.map("copy", sums[turn + 1], row)

    memory.repeat(turns, add)
    memory.map("neg", out, sums)
    run(memory)
    expected = (2 * x).cumsum(0)
    assert torch.equal(out[: turns + 1], -expected[: turns + 1])
    assert not out[turns + 1 :].count_nonzero()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_reduction_along_any_dimensions(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 5, 18]), min_size=1, max_size=3))
    a = strided(data.draw, shape)
    kept = [data.draw(st.booleans()) for _ in a.shape]
    out = torch.empty([size if keep else 1 for size, keep in zip(a.shape, kept)])
    memory = StepMemory([])
    memory.constant(a), memory.keep(out)
    memory.reduce("add", out, a, 0.0)
    run(memory)
    reduced = [d for d, keep in enumerate(kept) if not keep]
    expected = a.double().sum(reduced, keepdim=True) if reduced else a.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers", DTYPES)
def test_matrices_of_odd_sizes(numbers, threads):
    for n_in, n_out, vectors in [(1, 1, 1), (3, 5, 2), (17, 3, 1), (65, 9, 3), (130, 1001, 1), (130, 1001, 11)]:
        layer, x = DecodingLinear(nn.Linear(n_in, n_out), numbers), torch.randn(vectors, n_in)
        memory, out = StepMemory([x]), torch.empty(vectors, n_out)
        memory.constant(layer.stored), memory.constant(layer.scale), memory.constant(layer.bias)
        memory.linear(out, x, layer.stored, layer.scale, layer.bias)
        y = torch.randn_like(x)
        (result,) = run(memory, [x], [out], again=[y])
        torch.testing.assert_close(result.double(), by_torch(layer, y), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("numbers", DTYPES)
def test_products_of_different_numbers_of_vectors_in_one_room(numbers):
    """A product finds whatever the one before left in the memory that it computes in."""
    layer, inputs = DecodingLinear(nn.Linear(200, 100), numbers), [torch.randn(n, 200) for n in (4, 8, 1, 6, 40)]
    memory, outs = StepMemory(inputs), [torch.empty(len(x), 100) for x in inputs]
    memory.constant(layer.stored), memory.constant(layer.scale), memory.constant(layer.bias)
    for x, out in zip(inputs, outs):
        memory.linear(out, x, layer.stored, layer.scale, layer.bias)
    for x, result in zip(inputs, run(memory, inputs, outs)):
        torch.testing.assert_close(result.double(), by_torch(layer, x), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("shape", [(20_011,), (3, 7001), (2, 3, 5, 700)])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_large_maps_over_threads(shape, is_reduced, threads):
    a, turned = torch.randn(shape), shape[::-1] if len(shape) < 4 else (700, 3, 5, 2)
    memory, out = StepMemory([a]), torch.empty((1, *shape[1:]) if is_reduced else turned)
    memory.reduce("maximum", out, a, -5.0) if is_reduced else memory.map("mul", out, a.transpose(0, -1), 3.0)
    (result,) = run(memory, [a], [out], again=[-a])
    assert torch.equal(result, (-a).amax(0, keepdim=True) if is_reduced else -3 * a.transpose(0, -1))


@pytest.mark.parametrize("width", [5, 16, 33])
def test_layer_norms(width):
    x, weight, bias = 3 + torch.randn(2, 3, width), torch.randn(width), torch.randn(width)
    memory, out = StepMemory([x]), torch.empty(2, 3, width)
    memory.constant(weight), memory.constant(bias)
    memory.normalise(out, x, width, weight, bias, 1e-3)
    (result,) = run(memory, [x], [out])
    expected = nn.functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-3)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("width", [16, 21, 48, 64, 80, 144])
@pytest.mark.parametrize("is_delta_rule", [False, True])
def test_matrices_past_the_caches(monkeypatch, width, is_delta_rule, threads):
    q, k, a = (torch.randn(70, 9) for _ in range(3))
    v, state, b = torch.randn(70, width), torch.randn(70, 9, width), torch.rand(70) if is_delta_rule else None
    y, last = torch.empty_like(v), torch.empty_like(state)
    inputs = [q, k, v, a, state, *([b] if is_delta_rule else [])]
    memory = StepMemory(inputs)
    memory.update(y, last, q, k, v, a, state, b)
    decayed = a[..., None] * state
    value = b[:, None] * (v - (k[..., None] * decayed).sum(1)) if is_delta_rule else v
    expected = decayed + k[..., None] * value[:, None]
    results = []
    for cached in (2**40, 0):
        monkeypatch.setattr(_program, "_CACHED", cached)
        program = StepProgram(_LoweredStep(memory.instructions, memory.workspace(), inputs, [y, last]))
        assert bool(program._table[-1, 1] & PAST) == (not cached)
        results.append(program.run(inputs))
        assert torch.allclose(results[-1][1], expected, atol=1e-5)
        assert torch.allclose(results[-1][0], (q[..., None] * expected).sum(1), atol=1e-4)
    assert all(map(torch.equal, *results))


def test_codes_are_not_written_past_the_caches():
    """They are made in memory of the thread, which is read again at once, and lies anywhere."""
    kinds = range(8)
    rows = [Instruction(UPDATE, kind, [], []) for kind in kinds]
    assert _program._table(rows, {}, PAST)[:, 1].tolist() == [kind if kind & 2 else kind + PAST for kind in kinds]


def test_rows_of_a_table_and_one_that_is_not_there():
    table, rows, out = torch.randn(7, 21), torch.tensor([[3, 0], [6, 3]]), torch.empty(2, 2, 21)
    memory = StepMemory([rows])
    memory.constant(table)
    memory.look_up(out, table, rows)
    (result,) = run(memory, [rows], [out])
    assert torch.equal(result, table[rows])
    for wrong in (7, -1):
        assert run(memory, [rows], [out], again=[torch.tensor([[0, 1], [2, wrong]])]) is None


def test_results_are_new_and_inputs_may_lie_anyhow():
    x, out = torch.randn(4, 5), torch.empty(4, 5)
    memory = StepMemory([x])
    memory.map("mul", out, x, 2.0)
    program = StepProgram(_LoweredStep(memory.instructions, memory.workspace(), [x], [out]))
    y = torch.randn(5, 4).t()
    (first,), (second,) = program.run([y]), program.run([x])
    assert torch.equal(first, 2 * y)
    assert torch.equal(second, 2 * x)
    for wrong in ([y.double()], [y.t()], [y[:2]], [y.to("meta")], [y.to_sparse()], [y, y], []):
        assert program.run(wrong) is None
    for without_memory in (torch._efficientzerotensor((4, 5)), FakeTensorMode().from_tensor(torch.randn(4, 5))):
        assert program.run([without_memory]) is None
    assert torch.equal(program.run([torch._neg_view(y)])[0], -2 * y)


def test_what_there_is_no_instruction_for():
    x, memory = torch.randn(3), StepMemory([])
    with pytest.raises(StepNotCompiled, match="uses a result that no instruction gives"):
        memory.map("copy", memory.scratch([3]), x)
    with pytest.raises(StepNotCompiled, match="a tensor is on meta"):
        memory.map("copy", memory.scratch([3]), memory.constant(torch.empty(3, device="meta")))
    memory.constant(x)
    with pytest.raises(StepNotCompiled, match=r"a tensor is torch\.float64"):
        memory.map("copy", memory.scratch([3]), memory.constant(x.double()))
    with pytest.raises(StepNotCompiled, match="changes a constant or its input"):
        memory.map("copy", x, 1.0)
    five = memory.constant(torch.randn(3, 2, 2, 2, 2, 2)[:, :, ::2, :, :1, :]).permute(5, 2, 1, 0, 4, 3)
    whole = memory.constant(torch.randn([3, 1] * 5)).expand([3] * 10)
    with pytest.raises(StepNotCompiled, match="at most 4"):
        memory.map("copy", memory.scratch(whole.shape), whole)
    memory.map("copy", memory.scratch(five.shape), five)
