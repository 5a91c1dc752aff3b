"""From torch's operations to instructions: a rule for every operation that steps are made of.

A rule gets the memory, the result that torch gave when the step was recorded, and the operation's arguments. Complex
tensors are computed as two planes. Views, and results that are the same in every call, need no rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recurra.decoding.memory import StepMemory, StepNotCompiled

RULES: dict[str, Callable[..., None]] = {}
"""The rules, by the operation's name as torch writes it."""

SHAPE_ONLY = {f"aten.{name}.default" for name in ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros")}
SHAPE_ONLY.add("aten.new_full.default")
"""Operations that use only the shapes of their tensors."""

VIEWED_ANEW = {"aten.transpose_.default", "aten.t_.default", "aten.squeeze_.dim", "aten.unsqueeze_.default"}
"""Operations that change a tensor's view of its memory, but not the memory."""

_Number = Tensor | float
_Planes = tuple[Any, Any]


def _rule(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _planes(x: _Number | complex) -> _Planes:
    """Give the real and the imaginary part; None for the imaginary part of real numbers."""
    if isinstance(x, Tensor):
        return tuple(torch.view_as_real(x).unbind(-1)) if x.is_complex() else (x, None)  # type: ignore[return-value]
    return (x.real, x.imag) if isinstance(x, complex) else (float(x), None)


def _map(memory: StepMemory, name: str, out: Tensor, x: _Number, y: _Number | None = None) -> None:
    """Apply a real function, or one that acts on each plane separately."""
    (out_re, out_im), (x_re, x_im) = _planes(out), _planes(x)
    y_re, y_im = (None, None) if y is None else _planes(y)
    memory.map(name, out_re, x_re, y_re)
    if out_im is not None:
        missing = 0.0 if y is not None or x_im is None else None
        memory.map(name, out_im, 0.0 if x_im is None else x_im, missing if y_im is None else y_im)


def _simple(function: str, *constants: float) -> Callable[..., None]:
    """A rule that is one real function of the operation's first arguments, as many as there are, or of constants."""

    def lower(memory: StepMemory, out: Tensor, *operands: _Number) -> None:
        memory.map(function, out, *operands, *constants)

    return lower


RULES.update(
    {
        f"aten.{name}.default": _simple(name)
        for name in ("exp", "sin", "cos", "sqrt", "sigmoid", "silu", "tanh", "expm1", "abs", "maximum", "minimum")
    }
)
RULES["aten.relu.default"] = _simple("maximum", 0.0)
RULES["aten.clamp_min.default"] = _simple("maximum")


@_rule("aten.gt.Scalar")
def _gt(memory: StepMemory, out: Tensor, x: Tensor, bound: float) -> None:
    if bound:
        raise StepNotCompiled("a comparison with another number than 0")
    kept = memory.scratch(x.shape)
    memory.map("copy", kept, x)  # which a later operation may change in place
    memory.compared[out.untyped_storage().data_ptr()] = kept


@_rule("aten.where.self")
def _where(memory: StepMemory, out: Tensor, condition: Tensor, x: Tensor, y: Tensor) -> None:
    compared = memory.compared.get(condition.untyped_storage().data_ptr())
    if compared is None:
        raise StepNotCompiled("a choice that is not between numbers above 0 and others")
    other = memory.scratch(out.shape)
    memory.map("where_positive", out, x, compared)
    memory.map("where_not_positive", other, y, compared)
    memory.map("add", out, out, other)


@_rule("aten.neg.default")
def _neg(memory: StepMemory, out: Tensor, x: Tensor) -> None:
    _map(memory, "neg", out, x)


@_rule("aten.clone.default", "aten._to_copy.default", "aten._unsafe_view.default", "aten.view.default")
def _copy(memory: StepMemory, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    if out.dtype != x.dtype:
        raise StepNotCompiled(f"numbers are turned from {x.dtype} into {out.dtype}")
    _map(memory, "copy", out, x.reshape(out.shape) if out.is_contiguous() and x.is_contiguous() else x)


@_rule("aten.gelu.default")
def _gelu(memory: StepMemory, out: Tensor, x: Tensor, approximate: str = "none") -> None:
    memory.map("gelu" if approximate == "none" else "gelu_tanh", out, x)


@_rule("aten.softplus.default")
def _softplus(memory: StepMemory, out: Tensor, x: Tensor, beta: float = 1, threshold: float = 20) -> None:
    if (beta, threshold) != (1, 20):
        raise StepNotCompiled("a softplus has a factor or a threshold of its own")
    memory.map("softplus", out, x)


@_rule("aten.log_sigmoid_forward.default")
def _log_sigmoid(memory: StepMemory, outs: Sequence[Tensor], x: Tensor) -> None:
    memory.map("neg", outs[0], x)
    memory.map("softplus", outs[0], outs[0])
    memory.map("neg", outs[0], outs[0])


@_rule("aten.clamp.default")
def _clamp(memory: StepMemory, out: Tensor, x: Tensor, low: float | None = None, high: float | None = None) -> None:
    if low is not None:
        memory.map("maximum", out, x, low)
    if high is not None:
        memory.map("minimum", out, x if low is None else out, high)


def _sum_or_difference(function: str, is_turned: bool = False) -> Callable[..., None]:
    def lower(memory: StepMemory, out: Tensor, x: _Number, y: _Number, alpha: float = 1) -> None:
        if alpha != 1:
            raise StepNotCompiled("a sum or a difference has a factor")
        _map(memory, function, out, *((y, x) if is_turned else (x, y)))

    return lower


_rule("aten.add.Tensor", "aten.add.Scalar")(_sum_or_difference("add"))
_rule("aten.sub.Tensor", "aten.sub.Scalar")(_sum_or_difference("sub"))
_rule("aten.rsub.Scalar")(_sum_or_difference("sub", is_turned=True))


@_rule("aten.mul.Tensor", "aten.mul.Scalar")
def _mul(memory: StepMemory, out: Tensor, x: _Number, y: _Number) -> None:
    (out_re, out_im), (x_re, x_im), (y_re, y_im) = _planes(out), _planes(x), _planes(y)
    if out_im is None or not isinstance(out_re, Tensor) or not isinstance(out_im, Tensor):
        memory.map("mul", out, x, y)
    elif x_im is None or y_im is None:
        memory.map("mul", out_re, x_re, y_re)
        memory.map("mul", out_im, *((x_re, y_im) if x_im is None else (x_im, y_re)))
    else:
        first, second = memory.scratch(out.shape), memory.scratch(out.shape)
        memory.map("mul", first, x_re, y_re)
        memory.map("mul", second, x_im, y_im)
        memory.map("sub", out_re, first, second)
        memory.map("mul", first, x_re, y_im)
        memory.map("mul", second, x_im, y_re)
        memory.map("add", out_im, first, second)


@_rule("aten.div.Tensor", "aten.div.Scalar")
def _div(memory: StepMemory, out: Tensor, x: Tensor, y: _Number) -> None:
    if _planes(y)[1] is not None:
        raise StepNotCompiled("a division by complex numbers")
    for out_plane, x_plane in zip(_planes(out), _planes(x)):
        if out_plane is not None:
            memory.map("div", out_plane, x_plane, y)


RULES["aten.reciprocal.default"] = lambda memory, out, x: memory.map("div", out, 1.0, x)


@_rule("aten.rsqrt.default")
def _rsqrt(memory: StepMemory, out: Tensor, x: Tensor) -> None:
    memory.map("sqrt", out, x)
    memory.map("div", out, 1.0, out)


@_rule("aten.pow.Tensor_Scalar")
def _pow(memory: StepMemory, out: Tensor, x: Tensor, power: float) -> None:
    if power != 2:
        raise StepNotCompiled(f"a power of {power}")
    memory.map("mul", out, x, x)


@_rule("aten.glu.default")
def _glu(memory: StepMemory, out: Tensor, x: Tensor, dim: int = -1) -> None:
    value, gate = x.chunk(2, dim)
    memory.map("sigmoid", out, gate)
    memory.map("mul", out, value, out)


@_rule("aten.complex.default")
def _complex(memory: StepMemory, out: Tensor, re: Tensor, im: Tensor) -> None:
    for plane, part in zip(torch.view_as_real(out).unbind(-1), (re, im)):
        memory.map("copy", plane, part)


@_rule("aten.sum.default", "aten.sum.dim_IntList")
def _sum(memory: StepMemory, out: Tensor, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> None:
    _reduce(memory, "add", out, x, dims, 0.0)


@_rule("aten.mean.dim")
def _mean(memory: StepMemory, out: Tensor, x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> None:
    _reduce(memory, "add", out, x, dims, 0.0)
    memory.map("mul", out, out, out.numel() / x.numel())


@_rule("aten.amax.default")
def _amax(memory: StepMemory, out: Tensor, x: Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> None:
    _reduce(memory, "maximum", out, x, dims, -float("inf"))


def _reduce(memory: StepMemory, name: str, out: Tensor, x: Tensor, dims: Sequence[int] | None, start: float) -> None:
    reduced = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
    kept = out.view([1 if d in reduced else size for d, size in enumerate(x.shape)])
    for plane, of in zip(_planes(kept), _planes(x)):
        if plane is not None:
            memory.reduce(name, plane, of, start)


@_rule("aten._softmax.default")
def _softmax(memory: StepMemory, out: Tensor, x: Tensor, dim: int, half_to_float: bool) -> None:
    shape = list(x.shape)
    shape[dim] = 1
    largest, sums = memory.scratch(shape), memory.scratch(shape)
    memory.reduce("maximum", largest, x, -float("inf"))
    memory.map("sub", out, x, largest)
    memory.map("exp", out, out)
    memory.reduce("add", sums, out, 0.0)
    memory.map("div", out, out, sums)


@_rule("aten.cat.default")
def _cat(memory: StepMemory, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    start = 0
    for part in parts:
        if part.numel():
            _copy(memory, out.narrow(dim, start, part.shape[dim]), part)
            start += part.shape[dim]


@_rule("aten.cumsum.default")
def _cumsum(memory: StepMemory, out: Tensor, x: Tensor, dim: int) -> None:
    if x.shape[dim] != 1:
        raise StepNotCompiled(f"running sums of {x.shape[dim]} numbers")
    memory.map("copy", out, x)


@_rule("aten.stack.default")
def _stack(memory: StepMemory, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    for number, part in enumerate(parts):
        _copy(memory, out.select(dim, number), part)


@_rule("aten.constant_pad_nd.default")
def _pad(memory: StepMemory, out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0) -> None:
    inner = out
    for number in range(len(pad) // 2):
        before, after = pad[2 * number : 2 * number + 2]
        if before < 0 or after < 0:
            raise StepNotCompiled("a negative padding")
        dim = out.dim() - 1 - number
        inner = inner.narrow(dim, before, x.shape[dim])
    _map(memory, "copy", out, value)
    _copy(memory, inner, x)


RULES["recurra.decoding_linear.default"] = StepMemory.linear
RULES["aten.embedding.default"] = lambda memory, out, table, rows, *_: memory.look_up(out, table, rows)


@_rule("aten.topk.default")
def _topk(
    memory: StepMemory, outs: Sequence[Tensor], x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any
) -> None:
    if dim % x.dim() != x.dim() - 1 or not largest or not k:
        raise StepNotCompiled("a choice of the smallest numbers, of none, or along other dimensions than the last")
    values, numbers = outs
    memory.choose(values, numbers, x)


@_rule("aten.gather.default")
def _gather(memory: StepMemory, out: Tensor, x: Tensor, dim: int, numbers: Tensor) -> None:
    if x.dim() != 2 or dim % 2 != 1 or len(x) != len(numbers):
        raise StepNotCompiled("numbers gathered from more than rows")
    x = _dense(memory, x)
    for row, table, places in zip(out.unsqueeze(-1), x.unsqueeze(-1), numbers):
        memory.look_up(row, table, places)


_MOST_CHOICES = 128
"""Most products with a chosen matrix in one operation: each is an instruction. For more, experts are grouped."""


@_rule("recurra.decoding_experts.default")
def _experts(
    memory: StepMemory,
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    chosen: Tensor,
    gated: bool,
) -> None:
    if chosen.numel() > _MOST_CHOICES:
        raise StepNotCompiled(f"{chosen.numel()} choices of experts")
    x, (n_inner, n_out) = _dense(memory, x), (gate_up_scale.shape[1], down_scale.shape[1])
    inner, hidden = (memory.scratch((*chosen.shape, size)) for size in (n_inner, n_inner // (1 + gated)))
    biases = [memory.constant(torch.zeros(size, dtype=torch.float32)) for size in (n_inner, n_out)]
    choices = [(token, number) for token in range(chosen.shape[0]) for number in range(chosen.shape[1])]
    for at in choices:
        memory.linear_of(inner[at], x[at[0]], gate_up, gate_up_scale, biases[0], chosen[at])
    if gated:
        gate, up = inner.chunk(2, -1)
        memory.map("silu", hidden, gate)
        memory.map("mul", hidden, hidden, up)
    else:
        memory.map("maximum", hidden, inner, 0.0)
        memory.map("mul", hidden, hidden, hidden)
    for at in choices:
        memory.linear_of(out[at], hidden[at], down, down_scale, biases[1], chosen[at])


@_rule("aten.native_layer_norm.default")
def _layer_norm(memory: StepMemory, outs: Sequence[Tensor], x: Tensor, shape: Sequence[int], *rest: Any) -> None:
    (weight, bias, small), width = rest, torch.Size(shape).numel()
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    weight = memory.constant(torch.ones(width, **options)) if weight is None else weight
    bias = memory.constant(torch.zeros(width, **options)) if bias is None else bias
    memory.normalise(outs[0], x, width, weight, bias, small)


@_rule("aten.addmm.default", "aten.baddbmm.default")
def _linear(
    memory: StepMemory, out: Tensor, bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    if beta != 1 or alpha != 1:
        raise StepNotCompiled("a matrix product with factors")
    _matrix_product(memory, out, x, y)
    memory.map("add", out, out, bias)


@_rule("aten.mm.default", "aten.bmm.default")
def _matrix_product(memory: StepMemory, out: Tensor, x: Tensor, y: Tensor) -> None:
    if y.dim() == 2 and memory.is_constant(y) and not y.is_complex():
        weight = y.t() if y.t().is_contiguous() else memory.constant(y.t().contiguous())
        scale, bias = (memory.constant(fill(len(weight), dtype=torch.float32)) for fill in (torch.ones, torch.zeros))
        memory.linear(out, x, weight, scale, bias)
        return
    if y.dim() == 3 and memory.is_constant(y) and not y.is_complex():
        for part, vectors, matrix in zip(out, x, y):
            _matrix_product(memory, part, vectors, matrix)
        return
    if out.is_complex():
        raise StepNotCompiled("a product of complex matrices")
    products = memory.scratch((*x.shape, y.shape[-1]))
    memory.map("mul", products, x.unsqueeze(-1), y.unsqueeze(-3))
    memory.reduce("add", out.unsqueeze(-2), products, 0.0)


def _at(planes: _Planes, t: int) -> _Planes:
    return planes[0][:, t], None if planes[1] is None else planes[1][:, t]


def _recur(memory: StepMemory, h: _Planes, a: _Planes, b: _Planes, h0: _Planes) -> None:
    """Write h_t = a_t h_{t-1} + b_t (B, L, D), planes; the imaginary ones of h, a and h0 are all None or none is."""
    product = memory.scratch(h0[0].shape)

    def step(t: int, before: _Planes) -> None:
        (re, im), (a_re, a_im), (b_re, b_im) = _at(h, t), _at(a, t), _at(b, t)
        memory.map("mul", re, a_re, before[0])
        if im is not None:
            memory.map("mul", product, a_im, before[1])
            memory.map("sub", re, re, product)
            memory.map("mul", product, a_re, before[1])
            memory.map("mul", im, a_im, before[0])
            memory.map("add", im, product, im)
        memory.map("add", re, re, b_re)
        if b_im is not None:
            memory.map("add", im, im, b_im)

    step(0, h0)
    memory.repeat(h[0].shape[1] - 1, lambda t: step(t + 1, _at(h, t)))


@_rule("recurra.linear_scan.default")
def _linear_scan(memory: StepMemory, h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool, *_: Any) -> None:
    if reverse:
        raise StepNotCompiled("a scan that begins at the last step")
    _recur(memory, *map(_planes, (h, a, b, h0)))


@_rule("recurra.selective_scan.default")
def _selective_scan(memory: StepMemory, outs: Sequence[Tensor], *operands: Any) -> None:
    inputs = operands[:6]
    if operands[6]:
        raise StepNotCompiled("a selective scan keeps states for derivatives")
    memory.select(*outs[:2], *inputs)


def _dense(memory: StepMemory, x: Tensor) -> Tensor:
    """Copy a tensor unless its numbers follow one another, as those of several rows' heads in one projection do not."""
    if x.is_contiguous():
        return x
    dense = memory.scratch(x.shape)
    memory.map("copy", dense, x)
    return dense


@_rule("recurra.delta_rule_fused.default")
def _delta_rule(memory: StepMemory, outs: Sequence[Tensor], *operands: Any) -> None:
    q, k, v, a, b, state, *_ = operands
    if q.shape[1] != 1:
        raise StepNotCompiled(f"a delta rule of {q.shape[1]} steps")
    q, k, v, a, b = (_dense(memory, x[:, 0]).flatten(0, 1) for x in (q, k, v, a, b))
    memory.update(outs[0], outs[1], q, k, v, a, _dense(memory, state).flatten(0, 1), b)


@_rule("recurra.gate_loop_step.default")
def _gate_loop_step(memory: StepMemory, outs: Sequence[Tensor], *operands: Any) -> None:
    q, k, v, a = (_dense(memory, x[:, 0]).flatten(0, 1) for x in operands[:4])
    memory.update(outs[0], outs[1], q, k, v, a, _dense(memory, operands[4]).flatten(0, 1))


@_rule("recurra.generalised_delta_rule_fused.default")
def _generalised_delta_rule(memory: StepMemory, outs: Sequence[Tensor], *operands: Any) -> None:
    *inputs, state = operands[:7]
    if inputs[0].shape[1] != 1:
        raise StepNotCompiled(f"a delta rule of {inputs[0].shape[1]} steps")
    q, k, v, a, *others = (_dense(memory, x[:, 0]).flatten(0, 1) for x in inputs)
    memory.update(outs[0], outs[1], q, k, v, a, _dense(memory, state).flatten(0, 1), others=(others[0], others[1]))


@_rule("recurra.gate_loop_fused.default")
def _gate_loop(memory: StepMemory, outs: Sequence[Tensor], *operands: Any) -> None:
    (y, *returned), (q, k, v, a_re, a_im, x_re, x_im, *_) = outs, operands
    drive = memory.scratch(q.shape)
    memory.map("mul", drive, k, v)
    h: list[Any] = [*returned] if a_im is not None else [returned[0], None]
    if has_last := h[0].shape != q.shape:  # only the last state is returned
        h = [x if x is None else memory.scratch(q.shape) for x in h]
    _recur(memory, (h[0], h[1]), (a_re, a_im), (drive, None), (x_re, x_im))
    memory.map("mul", y, q, h[0])
    for last, states in zip(returned, h):
        if has_last and states is not None:
            memory.map("copy", last, states[:, -1:])
