"""Linear layers for decoding: weights packed in panels of fewer bits, each read once for many vectors."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from recurra._choices import DTYPES, Numbers
from recurra.checks import kind_of, require, require_layout, require_literal, sentence
from recurra.decoding._instructions import KINDS
from recurra.layers.experts import Experts, by_expert, expert_activation
from recurra.layers.feed_forward import TiedLinear
from recurra.ops._operator import Operator, usable_threads

# --- packed weights: panels of 64 outputs, in the order in which the kernels read them ---
#
#     bfloat16   (panels, pairs, 64, 2)    for each 2 inputs, the 2 weights of one output after those of the other
#     int8       (panels, quads, 64, 4)    for each 4 inputs, the 4 weights of one output after those of the other
#     int4       (panels, blocks, 4608)    bytes; for each 128 inputs three parts, of a word for each output:
#                                              the minima of its 4 groups of 32 inputs, int8
#                                              the steps of these groups, 4 bits each, and above them a factor, bfloat16
#                                              16 times the codes of 4 inputs, 4 bits, and above each the code 4 later
#                                          weight = factor (minimum + step code), the bracket being an int8
#
# A last panel, quad or block that is not full is filled up. float32 weights stay in rows, shared with the model.


PANEL = 64
"""Outputs in a panel: one byte for each fills a cache line."""
PAIR, QUAD = 2, 4
"""Inputs whose weights lie side by side in bfloat16 and in int8."""
GROUP, BLOCK = 32, 128
"""How many inputs of an output share a minimum and a step size in int4, and how many share a scale."""
BLOCK_BYTES = PANEL * (4 + 4 + BLOCK // 2)
_LARGEST = 15
"""The largest code, and the largest step size."""


def _to_sets(rows: Tensor, size: int) -> Tensor:
    """Turn (n_out, n_in) into (panels, sets, 64, size)."""
    full = functional.pad(rows, (0, -rows.shape[1] % size, 0, -rows.shape[0] % PANEL))
    sets = full.view(len(full) // PANEL, PANEL, full.shape[1] // size, size).transpose(1, 2)
    return sets.clone(memory_format=torch.contiguous_format)


def _from_sets(sets: Tensor, n_out: int, n_in: int) -> Tensor:
    """Turn (panels, sets, 64, size) into (n_out, n_in)."""
    return sets.transpose(1, 2).flatten(2).flatten(0, 1)[:n_out, :n_in]


def _to_int4(weight: Float[Tensor, "n_out n_in"]) -> UInt8[Tensor, "panels blocks bytes"]:
    """Quantise a few panels at a time, so that they stay in the cache."""
    # the missing inputs repeat the last one, so they do not widen a group's range
    full = torch.cat((weight, weight[:, -1:].expand(-1, -weight.shape[1] % BLOCK)), 1)
    return torch.cat([_panels_of_int4(rows) for rows in full.split(4 * PANEL)])


def _panels_of_int4(rows: Float[Tensor, "n_out n_in"]) -> UInt8[Tensor, "panels blocks bytes"]:
    n_blocks, full = rows.shape[1] // BLOCK, functional.pad(rows, (0, 0, 0, -len(rows) % PANEL))
    groups = full.view(len(full) // PANEL, PANEL, n_blocks, BLOCK // GROUP, GROUP)
    # as far as 119, so a code that is rounded up by half a step gives at most 127
    factor = (groups.abs().amax((3, 4)) / 119).bfloat16()
    groups = groups / factor.float().masked_fill(factor == 0, 1.0)[..., None, None]
    low, high = groups.amin(4, keepdim=True), groups.amax(4, keepdim=True)
    widest = ((high - low) / _LARGEST).round()
    kept: tuple[Tensor, ...] = ()
    least = torch.full_like(low, math.inf)
    for more in (-1, 0, 1):  # a step that cuts off the ends is often closer to the rest
        step = (widest + more).clamp(0, _LARGEST)
        minimum = ((low + high - _LARGEST * step) / 2).round().clamp_min(-128)
        rest = groups - minimum
        codes = (rest / step.clamp_min(1)).round_().clamp_(0, _LARGEST)
        error = rest.addcmul_(codes, step, value=-1).square_().sum(4, keepdim=True)
        new = minimum, step, codes.to(torch.int8)
        kept = tuple(torch.where(error < least, *pair) for pair in zip(new, kept or new))
        least = torch.minimum(least, error)
    minimum, step, codes = (part.squeeze(4).to(torch.int8).view(torch.uint8) for part in kept)
    steps = step[..., ::2] | step[..., 1::2] << 4
    pairs = codes.view(*codes.shape[:3], BLOCK // 8, 2, 4)
    heads = torch.stack((minimum, torch.cat((steps, factor[..., None].view(torch.uint8)), 3)), 3)
    words = torch.cat((heads, pairs[..., 0, :] | pairs[..., 1, :] << 4), 3)
    return words.permute(0, 2, 3, 1, 4).flatten(2).contiguous()


def _from_int4(stored: UInt8[Tensor, "panels blocks bytes"], n_out: int, n_in: int) -> Float[Tensor, "n_out n_in"]:
    """Return the weights that `_to_int4` kept."""
    words = stored.view(*stored.shape[:2], BLOCK_BYTES // (4 * PANEL), PANEL, 4).permute(0, 3, 1, 2, 4)
    minimum, (steps, factor) = words[..., 0, :].view(torch.int8), words[..., 1, :].split(2, 3)
    step = torch.stack((steps & 15, steps >> 4), 4).flatten(3)
    codes = torch.stack((words[..., 2:, :] & 15, words[..., 2:, :] >> 4), 4).view(*step.shape, GROUP)
    whole = minimum[..., None] + step[..., None] * codes
    values = factor.contiguous().view(torch.bfloat16).float()[..., None] * whole
    return values.flatten(2).flatten(0, 1)[:n_out, :n_in]


# --- a packed matrix times a few vectors, as a torch operator, so that a traced model can contain it ---
#
#     recurra::decoding_linear    y = scale (W x) + bias      x (..., n_in) float32, scale, bias (n_out)
#
# W is float32 (n_out, n_in), or packed as bfloat16, int8 or int4. For bfloat16, x is rounded to bfloat16, for int8 and
# int4 to whole numbers (`products.rounded`).
# There is no derivative: asking for one raises.


MOST_VECTORS = 64
"""Most vectors that are multiplied by float32 weights here; above it torch's product is as fast."""
_LONG = 16
"""Steps of a sequence from which torch's product is at least as fast for one sequence, too. A long sequence's results
then do not depend on the pieces in which it is read, each of at least this length."""
_HELD = (torch.float32, torch.bfloat16)
"""Types of the models that can be packed."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.uint8: "int4"}
_FORMS = {"float32": (), "bfloat16": (PANEL, PAIR), "int8": (PANEL, QUAD), "int4": (BLOCK_BYTES,)}
"""What follows the first two dimensions of packed weights."""
_TOGETHER = 256
"""Most vectors that meet the weights in one pass: their numbers and sums stay in the cache."""


def describe_weights(weight: Tensor, n_in: int, n_out: int) -> tuple[int, int, int]:
    """Return what packed weights are: a number of `KINDS`, inputs, outputs."""
    dtype = _NAMES.get(weight.dtype, "")
    rest = _FORMS.get(dtype)
    if rest is None or weight.dim() != 2 + len(rest) or weight.shape[2:] != rest or not weight.is_contiguous():
        raise ValueError(sentence("weight", kind_of(weight), f"contiguous {', '.join(DTYPES)}, packed"))
    if dtype == "float32":
        return KINDS[dtype], weight.shape[1], weight.shape[0]
    n_panels, length = weight.shape[:2]
    n_out = n_out if -(-n_out // PANEL) == n_panels else n_panels * PANEL
    together = {"bfloat16": PAIR, "int8": QUAD, "int4": BLOCK}[dtype]
    return KINDS[dtype], n_in if -(-n_in // together) == length else length * together, n_out


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
    _, n_in, n_out = describe_weights(weight, x.shape[-1] if x.dim() else 0, scale.numel())
    require_layout("x", x, (*x.shape[:-1], n_in), torch.float32, weight.device)
    for name, tensor in (("scale", scale), ("bias", bias)):
        require_layout(name, tensor, (n_out,), torch.float32, weight.device)
        if not tensor.is_contiguous():
            raise ValueError(sentence(name, f"a view with strides {tensor.stride()}", "a contiguous tensor"))


def _run(y: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
    from recurra.decoding._matvec import matvec_kernel, multiply_share, room_bytes

    if y.numel() == 0:
        return
    kind, n_in, n_out = describe_weights(weight, x.shape[-1], scale.numel())
    x = x.resolve_neg().contiguous()
    vectors, jobs = y.numel() // n_out, min(usable_threads(), -(-n_out // PANEL))
    room_size = room_bytes(min(vectors, _TOGETHER), n_in)
    room = x.new_empty(jobs * room_size // 4)
    for first in range(0, vectors, _TOGETHER):
        matvec_kernel()(
            *(multiply_share[kind].address, weight.data_ptr(), scale.data_ptr(), bias.data_ptr()),
            *(x.data_ptr() + 4 * first * n_in, y.data_ptr() + 4 * first * n_out, min(_TOGETHER, vectors - first)),
            *(n_in, n_out, room.data_ptr(), room_size, jobs),
            jobs=jobs,
            work=n_in * n_out,
        )


_decoding_linear = Operator(
    "decoding_linear(Tensor x, Tensor weight, Tensor scale, Tensor bias) -> Tensor",
    check=_check,
    allocate=lambda x, weight, scale, bias: x.new_empty((*x.shape[:-1], scale.shape[0])),
    run=_run,
)


class DecodingLinear(nn.Module):
    """y = x W^T + b, as `nn.Linear` computes it, for inference on a CPU.

    "float32" shares the layer's weight; sums are float32, in a different order from torch's. "bfloat16" rounds each
    weight and input to 8 bits of precision; sums are float32, and numbers below 1.2e-38 may count as 0. "int8" stores
    integers from -127 to 127, and for each output one float32 scale, the output's largest weight / 127. "int4" stores
    integers from 0 to 15, for every 32 inputs of an output an integer step size and minimum, and for every 128 a
    bfloat16 scale: 4.5 bits per weight.
    With int8 and int4, every 128 inputs of a vector are rounded to integers from -127 to 127 times a scale
    (`rounded`), and products are exact. The result for a vector does not depend on the others, except with "float32"
    for more than 64 or for sequences of 16 steps or more, which torch multiplies.

    Args:
        linear: the layer whose weights to use, float32 or bfloat16 on the CPU.
        dtype: "float32", "bfloat16", "int8" or "int4".
    """

    stored: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear | TiedLinear, dtype: str = "float32") -> None:
        super().__init__()
        require_literal(Numbers, dtype=dtype)
        weight = linear.weight.detach()
        if weight.dtype not in _HELD or weight.device.type != "cpu":
            raise ValueError(sentence("linear.weight", kind_of(weight), "float32 or bfloat16 on the CPU"))
        weight = weight.float()
        self.dtype, self.in_features, self.out_features = dtype, linear.in_features, linear.out_features
        scale = torch.ones(self.out_features, dtype=torch.float32, device=weight.device)
        if dtype == "int8":
            scale = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
            weight = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        self.register_buffer("stored", _PACK[dtype](weight))
        self.register_buffer("scale", scale)
        bias = linear.bias.detach().float() if linear.bias is not None else torch.zeros_like(scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Float[Tensor, "*rows n_in"]) -> Float[Tensor, "*rows n_out"]:
        """Multiply every row of `x`, which must not require a gradient."""
        if x.requires_grad and torch.is_grad_enabled():
            hint = "call the copy under torch.no_grad(), or train the model itself"
            raise RuntimeError(sentence("x", "a tensor that requires a gradient", "one that does not", hint))
        if torch.is_autocast_enabled("cpu"):  # what torch has rounded for its own products
            x = x.float()
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise ValueError(sentence("x", kind_of(x), f"float32 (..., {self.in_features})"))
        vectors = x.numel() // self.in_features
        is_long = vectors > MOST_VECTORS or (x.dim() == 3 and x.shape[1] >= _LONG)
        if not vectors or (is_long and self.dtype == "float32"):
            return functional.linear(x, self.weight, self.bias)
        return _decoding_linear(x, self.stored, self.scale, self.bias)

    @property
    def weight(self) -> Float[Tensor, "n_out n_in"]:
        """The weights as float32, computed at each access unless they are kept so."""
        if self.dtype == "float32":
            return self.stored
        if self.dtype == "int4":
            return _from_int4(self.stored, self.out_features, self.in_features)
        return _from_sets(self.stored.float(), self.out_features, self.in_features) * self.scale.unsqueeze(1)

    def extra_repr(self) -> str:
        """What print shows."""
        return f"{self.in_features}, {self.out_features}, dtype={self.dtype}"


_PACK: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": Tensor.contiguous,
    "bfloat16": lambda weight: _to_sets(weight.bfloat16(), PAIR),
    "int8": lambda weight: _to_sets(weight, QUAD),
    "int4": _to_int4,
}


# --- packed experts, as a torch operator too, which reads the weights of the chosen ones alone ---
#
#     recurra::decoding_experts    y (tokens, top_k, d_model): each token's x through each of its experts
#
# A recorded step has it as one operation, so that every step chooses anew.


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), False)
    return linear


def _check_experts(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, chosen: Tensor, gated: bool
) -> None:
    n_experts, tokens, parts = len(gate_up), len(x), 1 + gated
    _, n_in, n_inner = describe_weights(gate_up[0], x.shape[-1], gate_up_scale.shape[-1])
    _, d_expert, n_out = describe_weights(down[0], n_inner // parts, down_scale.shape[-1])
    require_layout("x", x, (tokens, n_in), torch.float32, gate_up.device)
    for name, tensor, shape in (
        ("gate_up_scale", gate_up_scale, (n_experts, n_inner)),
        ("down", down, (n_experts, *down.shape[1:])),
        ("down_scale", down_scale, (n_experts, n_in)),
    ):
        require_layout(name, tensor, shape, gate_up.dtype if name == "down" else torch.float32, gate_up.device)
        if not tensor.is_contiguous():
            raise ValueError(sentence(name, f"a view with strides {tensor.stride()}", "a contiguous tensor"))
    require_layout("chosen", chosen, (tokens, chosen.shape[-1]), torch.int64, gate_up.device)
    sizes = (parts * d_expert, n_out)
    require(
        sizes == (n_inner, n_in), "down", kind_of(down), f"weights from {n_inner // parts} to {n_in} channels, packed"
    )


def _run_experts(
    y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    chosen: Tensor,
    gated: bool,
) -> None:
    order, counts = by_expert(chosen, len(gate_up))
    rows = y.view(-1, y.shape[-1])
    for expert, places in enumerate(order.split(counts)):
        if len(places):
            inputs = x.index_select(0, places // chosen.shape[1])
            inner = _product(inputs, gate_up[expert], gate_up_scale[expert])
            rows[places] = _product(expert_activation(inner, gated), down[expert], down_scale[expert])


def _product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    if weight.dtype == torch.float32 and len(x) > MOST_VECTORS:
        return functional.linear(x, weight)
    y = x.new_empty(len(x), len(scale))
    _run(y, x, weight, scale, torch.zeros_like(scale))
    return y


_decoding_experts = Operator(
    "decoding_experts(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, Tensor chosen,"
    " bool gated) -> Tensor",
    check=_check_experts,
    allocate=lambda x, *others: x.new_empty((*others[-2].shape, x.shape[-1])),
    run=_run_experts,
)


class DecodingExperts(nn.Module):
    """`Experts` for inference on a CPU, their weights kept as a `DecodingLinear` keeps its own."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __init__(self, experts: Experts, dtype: str) -> None:
        super().__init__()
        self.gated = experts.gated
        for name in ("gate_up", "down"):
            weight = getattr(experts, name).weight.detach().float()
            packed = [DecodingLinear(_linear(one, None), dtype) for one in weight]
            whole = weight if dtype == "float32" else torch.stack([one.stored for one in packed])
            self.register_buffer(name, whole.contiguous())
            self.register_buffer(f"{name}_scale", torch.stack([one.scale for one in packed]))

    def forward(
        self, x: Float[Tensor, "tokens d_model"], chosen: Int[Tensor, "tokens top_k"]
    ) -> Float[Tensor, "tokens top_k d_model"]:
        """Apply the chosen experts to each token."""
        weights = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        return _decoding_experts(x.float(), *weights, chosen, self.gated)
