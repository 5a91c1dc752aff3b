"""What is measured: sweeps over L, each with methods that compute one thing and the floor they are compared with."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from recurra import gate_loop, linear_scan
from recurra.gateloop import Planes, gate_loop_real_part, softmax_attention
from recurra.gateloop.operator import choose_mode
from recurra.scan import associative_scan, convolution_scan, linear_recurrence

Inputs = dict[str, Tensor]
Call = Callable[[], object]

FLOOR = "torch.add(a, b, out=c)"
MODES = {f'mode "{mode}"': mode for mode in ("fused", "scan", "chunk", "attention", "recurrent")}
"""The modes of gate_loop by the names of their curves."""


@dataclass(frozen=True)
class Way:
    """A method to compute what a sweep is about.

    build: makes a call without arguments from the inputs; its own preparation is not measured.
    bound: what its cost consists of, for the page.
    module: what must be importable, for other libraries.
    """

    build: Callable[[Inputs], Call]
    bound: str
    module: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its library can be imported."""
        return not self.module or importlib.util.find_spec(self.module) is not None


@dataclass(frozen=True)
class Sweep:
    """One figure: methods to compute one thing, for all L.

    The inputs are written when they are made; otherwise their memory would count as the first call's.

    shape: the inputs' shape, with an L in it. about: sentences for the page. inputs: makes them for a length.
    floor_bytes: what the floor reads and writes per step. auto: the mode that gate_loop picks for the inputs.
    """

    title: str
    shape: str
    about: str
    inputs: Callable[[int], Inputs]
    ways: dict[str, Way]
    floor_bytes: int
    auto: Callable[[Inputs], str] | None = field(default=None)


def _randn(*shape: int, gradient: bool = True) -> Tensor:
    return torch.randn(shape).requires_grad_(gradient)


def _gates(*shape: int) -> Tensor:
    """Draw magnitudes around 0.95, like those of trained gates."""
    return torch.sigmoid(3 + torch.randn(shape))


_add = Way(lambda x: lambda: torch.add(x["add_a"], x["add_b"], out=x["out"]), "reads two numbers, writes one")


# --- the linear scan ---------------------------------------------------------------------------------------------


def _scan_inputs(channels: int, gradient: bool) -> Callable[[int], Inputs]:
    def inputs(length: int) -> Inputs:
        torch.manual_seed(0)
        a, b = _gates(1, length, channels), torch.randn(1, length, channels)
        made = {"add_a": a, "add_b": b, "out": torch.ones_like(b)}
        made |= {name: x.detach().requires_grad_(gradient) for name, x in (("a", a), ("b", b))}
        return made | {"constant": _gates(channels).requires_grad_(gradient), "gradient": torch.randn_like(b)}

    return inputs


def _scan_way(scan: Callable[[Tensor, Tensor], Tensor], gradient: bool, gate: str = "a") -> Callable[[Inputs], Call]:
    def build(x: Inputs) -> Call:
        a, b = x[gate], x["b"]
        return (lambda: torch.autograd.grad(scan(a, b), (a, b), x["gradient"])) if gradient else (lambda: scan(a, b))

    return build


def _by_method(method: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: associative_scan(linear_recurrence, (a, b), method=method)[1]


def _peer(a: Tensor, b: Tensor) -> Tensor:
    from gateloop_transformer.associative_scan import associative_scan as peer_scan

    return peer_scan(linear_recurrence, (a, b))[1]


def _jax_way(gradient: bool) -> Callable[[Inputs], Call]:
    def build(x: Inputs) -> Call:
        import jax

        a, b, g = (jax.numpy.asarray(x[name].detach().numpy()) for name in ("a", "b", "gradient"))

        def scan(a: Any, b: Any) -> Any:
            return jax.lax.associative_scan(linear_recurrence, (a, b), axis=1)[1]

        def pull_back(a: Any, b: Any, g: Any) -> Any:
            return jax.vjp(scan, a, b)[1](g)

        arguments = (a, b, g) if gradient else (a, b)
        compiled = jax.jit(pull_back if gradient else scan).lower(*arguments).compile()  # ahead, as it would be in use
        return lambda: jax.block_until_ready(compiled(*arguments))

    return build


def _scan_sweep(channels: int, gradient: bool) -> Sweep:
    ways = {FLOOR: _add}
    if not gradient:
        ways["linear_scan into out"] = Way(
            lambda x: lambda: linear_scan(x["a"], x["b"], out=x["out"]), "the floor's traffic, plus a call"
        )
    ways |= {
        "linear_scan": Way(_scan_way(linear_scan, gradient), "its own traffic, plus new memory for the result"),
        "reference": Way(
            _scan_way(lambda a, b: linear_scan(a, b, backend="reference"), gradient), "several operator calls per step"
        ),
        "Hillis-Steele": Way(_scan_way(_by_method("hillis_steele"), gradient), "log2 L passes over all elements"),
        "Blelloch": Way(
            _scan_way(_by_method("blelloch"), gradient), "two sweeps through a tree, with copies at each level"
        ),
        "FFT convolution": Way(
            _scan_way(convolution_scan, gradient, gate="constant"), "transforms of length 2 L; constant gates only"
        ),
        "gateloop-transformer": Way(_scan_way(_peer, gradient), "a recursive tree in torch", "gateloop_transformer"),
        "jax.lax.associative_scan": Way(_jax_way(gradient), "a recursive tree, compiled by XLA", "jax"),
    }
    work = "forward and backward" if gradient else "forward"
    gradients = " Gradients are taken for all gates and inputs." if gradient else " No gradient is recorded."
    return Sweep(
        f"Linear scan, {channels} channels, {work}",
        f"(1, L, {channels})",
        f"h_t = a_t h_(t-1) + b_t, real, with a gate for every step and channel.{gradients}",
        _scan_inputs(channels, gradient),
        ways,
        floor_bytes=3 * 4 * channels,
    )


# --- GateLoop ----------------------------------------------------------------------------------------------------


def _mode_way(mode: str, bound: str) -> Way:
    def build(x: Inputs) -> Call:
        inputs = [x[name] for name in "qkva"]
        return lambda: torch.autograd.grad(gate_loop(*inputs, mode=mode)[0], inputs, x["gradient"])

    return Way(build, bound)


def _auto(x: Inputs) -> str:
    return choose_mode("auto", x["q"], x["k"], x["v"], x["a"])


_LOOP = "several operator calls per step"
_SQUARE = "scores for all pairs of steps"


def _max_headed_inputs(length: int) -> Inputs:
    torch.manual_seed(0)
    shape = (1, length, 64, 1)
    made = {name: _randn(*shape) for name in "qkv"}
    a = torch.polar(_gates(*shape), torch.randn(shape))
    made |= {"a": a.clone().requires_grad_(), "re": a.real.clone().requires_grad_()}
    made |= {"im": a.imag.clone().requires_grad_(), "state": torch.zeros(1, 64, 1, 1)}
    made |= {"gradient": torch.randn_like(a), "real_gradient": torch.randn(shape)}
    return made | {"add_a": a, "add_b": torch.randn_like(a), "out": torch.ones_like(a)}


def _real_part(x: Inputs) -> Call:
    reached = q, k, v, re, im = [x[name] for name in ("q", "k", "v", "re", "im")]

    def call() -> object:
        y, _ = gate_loop_real_part(q, k, v, Planes(re, im), state=x["state"])
        return torch.autograd.grad(y, reached, x["real_gradient"])

    return call


def _max_headed() -> Sweep:
    return Sweep(
        "GateLoop, 64 heads of size 1, forward and backward",
        "(1, L, 64, 1)",
        "Real q, k and v, with one complex gate per head; the floor adds complex numbers. The layer keeps only the "
        "real part of y, and its kernels never form the imaginary part.",
        _max_headed_inputs,
        {
            FLOOR: _add,
            "the layer's real part": Way(_real_part, "one kernel each way, without the imaginary part of y"),
            'mode "fused"': _mode_way("fused", "one kernel each way, plus torch for the imaginary part of y"),
            'mode "scan"': _mode_way("scan", "the scan, plus passes for its leaves and outputs"),
            'mode "recurrent"': _mode_way("recurrent", _LOOP),
            'mode "attention"': _mode_way("attention", _SQUARE),
        },
        floor_bytes=3 * 8 * 64,
        auto=_auto,
    )


def _heads_inputs(length: int) -> Inputs:
    torch.manual_seed(0)
    shape = (1, length, 8, 64)
    made = {name: _randn(*shape) for name in "qkv"}
    made |= {"a": _gates(1, length, 8, 1).requires_grad_(), "gradient": torch.randn(shape)}
    return made | {"add_a": made["q"].detach(), "add_b": made["k"].detach(), "out": torch.ones(shape)}


def _softmax(x: Inputs) -> Call:
    inputs = [x[name] for name in "qkva"]
    return lambda: torch.autograd.grad(softmax_attention(*inputs), inputs, x["gradient"])


def _sdpa(x: Inputs) -> Call:
    inputs = [x[name] for name in "qkv"]

    def call() -> object:
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return torch.autograd.grad(y, inputs, x["gradient"])

    return call


def _heads() -> Sweep:
    return Sweep(
        "GateLoop, 8 heads of size 64, forward and backward",
        "(1, L, 8, 64)",
        "Real, with one gate per head. The two softmax attentions compute a different function of q, k and v; they "
        "show what the same sizes cost there.",
        _heads_inputs,
        {
            FLOOR: _add,
            'mode "chunk"': _mode_way("chunk", "one kernel each way, with the 64 x 64 state in the cache"),
            'mode "scan"': _mode_way("scan", "64 x 64 numbers per head and step"),
            'mode "recurrent"': _mode_way("recurrent", _LOOP),
            'mode "attention"': _mode_way("attention", _SQUARE),
            "softmax_attention": Way(_softmax, _SQUARE),
            "torch's SDPA, causal": Way(_sdpa, "scores for all pairs of steps, not stored"),
        },
        floor_bytes=3 * 4 * 512,
        auto=_auto,
    )


SWEEPS: dict[str, Sweep] = {
    "scan-64-forward": _scan_sweep(64, gradient=False),
    "scan-64-both": _scan_sweep(64, gradient=True),
    "scan-8-forward": _scan_sweep(8, gradient=False),
    "scan-8-both": _scan_sweep(8, gradient=True),
    "gate-loop-64x1": _max_headed(),
    "gate-loop-8x64": _heads(),
}
