"""The front door of the linear recurrence h_t = a_t h_{t-1} + b_t."""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.autograd.graph import increment_version

from recurra.checks import kind_of, require_layout, require_tensor, sentence
from recurra.kernels.backends import choose_backend
from recurra.kernels.operator import has_numbers, transforms_are_active
from recurra.kernels.tensors import HALF
from recurra.lengths.packed import check_cu_seqlens, start_anew
from recurra.lengths.reset import check_reset, cut_transitions
from recurra.scan.operators import differentiable_scan, scan_into
from recurra.scan.reference import linear_scan_reference

_COMPUTED_AS_THEY_ARE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def linear_scan(
    a: Tensor,
    b: Shaped[Tensor, "B L *channels"],
    h0: Shaped[Tensor, "N *channels"] | None = None,
    *,
    reverse: bool = False,
    backend: str = "auto",
    out: Tensor | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a_t h_{t-1} + b_t along dimension 1 (GateLoop (7); notes, linear RNN).

    Args:
        a: the transitions, of any shape that broadcasts to b's: (B, L, *channels), (L, *channels), (*channels,) ...
        b: the inputs, (B, L, *channels).
        h0: the state before the first step (after the last one if `reverse`), (B, *channels); zeros if None.
        reverse: walk from the last step to the first: h_t = a_t h_{t+1} + b_t.
        backend: "reference" (plain torch, any device), "numba" (CPU), "triton" (CUDA; on the CPU only in Triton's
            interpreter, for tests), or "auto", the fastest that can run here. A backend named explicitly runs or
            raises.
        out: a tensor like the result, to write it into; only for the CPU kernel and where no gradient is needed. It
            saves the page faults of fresh memory, which take most of the time of a large result (without `out`, huge
            pages reduce them where the system gives any). `out` can be a or b itself, and h0 can lie in it; it must
            not overlap a or b in any other way.
        cu_seqlens: the borders of N packed sequences in b (1, T, *channels): N + 1 ascending integers from 0 to T. The
            recurrence starts again at each, from its own h0 (N, *channels). It is still one scan, with transitions of 0
            at the borders: no gradient crosses them, but 0 times NaN or infinity is NaN, which spreads to the sequences
            that follow. The states after the sequences are h[0, cu_seqlens[1:] - 1] if none is empty.
        reset: True where a sequence starts: that step is its first, from zeros (in either direction, no state passes
            between it and the step before). These are transitions of 0 too, as at borders.

    Returns:
        h, (B, L, *channels), in the type that a, b and h0 promote to. float16 and bfloat16 are computed in float32.

    Every backend can be differentiated in a, b and h0 any number of times. On the CPU kernel a real scan equals the
    reference bit for bit, NaN and infinity included.

    Raises:
        TypeError: an argument is not a tensor, or has an integer type.
        ValueError: shapes or devices do not fit, `out` overlaps an input, or the backend does not exist.
        RuntimeError: the backend cannot run here, or `out` is given where it is not supported.

    >>> linear_scan(torch.tensor([0.5]), torch.ones(1, 4, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    dtype = common_dtype(a, b, h0)
    check_shapes(a, b, h0, cu_seqlens)
    if reset is not None:
        check_reset(b, reset, cu_seqlens)
    chosen = choose_backend(backend, b.device)
    computed = torch.float32 if dtype in HALF else dtype
    if out is not None:
        _check_out(out, a, b, h0, dtype, chosen)
    a, b, h0 = a.to(computed), b.to(computed), None if h0 is None else h0.to(computed)
    if cu_seqlens is not None:
        a, b, h0 = *start_anew(a, b, h0, cu_seqlens, reverse), None
    if reset is not None:
        a = cut_transitions(a, reset, b.dim(), reverse)
    return _flattened(a, b, h0, reverse, chosen, out).to(dtype)


def _flattened(a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, backend: str, out: Tensor | None) -> Tensor:
    """Run the scan with all channels as one dimension, into `out` if that is given."""
    h0 = b.new_zeros(b.shape[:1] + b.shape[2:]) if h0 is None else h0
    if b.numel() == 0:  # nothing to scan; the graph stays connected
        return a * b + h0.unsqueeze(1) if out is None else out
    batch, length = b.shape[:2]
    flat_a = a.expand(b.shape).reshape(batch, length, -1)
    flat_b, flat_h0 = b.reshape(batch, length, -1), h0.reshape(batch, -1)
    if out is not None and not torch.compiler.is_compiling() and all(map(has_numbers, (out, a, b, h0))):
        scan_into(out.view(flat_b.shape), flat_a, flat_b, flat_h0, reverse)
        increment_version(out)  # so that a graph that has saved it refuses to go on
        return out
    if backend == "reference":
        h = linear_scan_reference(flat_a, flat_b, flat_h0, reverse)
    else:
        h = differentiable_scan(flat_a, flat_b, flat_h0, reverse, backend)
    return h.reshape(b.shape) if out is None else out.copy_(h.reshape(b.shape))


def common_dtype(a: Tensor, b: Tensor, h0: Tensor | None) -> torch.dtype:
    """Return the type that the arguments of a scan promote to.

    Raises:
        TypeError: an argument is not a tensor, or not of floating-point or complex numbers.
        ValueError: an argument is on another device than b.
    """
    named = {"a": a, "b": b} if h0 is None else {"a": a, "b": b, "h0": h0}
    for name, tensor in named.items():
        require_tensor(name, tensor)
    for name, tensor in named.items():
        if tensor.dtype not in HALF + _COMPUTED_AS_THEY_ARE:
            expected = "float16, bfloat16, float32, float64, complex64 or complex128"
            raise TypeError(sentence(name, kind_of(tensor), expected, f"convert it, for example {name}.float()"))
        if tensor.device != b.device:
            raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {b.device}, as b"))
    dtype = torch.promote_types(a.dtype, b.dtype)
    return dtype if h0 is None else torch.promote_types(dtype, h0.dtype)


def check_shapes(a: Tensor, b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Refuse shapes that do not make a scan, of a batch or of packed sequences.

    Raises:
        TypeError: `cu_seqlens` is not a tensor of integers.
        ValueError: a shape does not fit b's, or the borders do not fit b.
    """
    if b.dim() < 2:
        raise ValueError(sentence("b", kind_of(b), "(B, L, *channels)"))
    shape = tuple(b.shape)
    if a.dim() > b.dim() or not all(n in (1, m) for n, m in zip(a.shape[::-1], shape[::-1])):
        mend = "each of its dimensions, counted from the last, must be 1 or b's"
        raise ValueError(sentence("a", kind_of(a), f"a shape that broadcasts to b's {shape}", mend))
    n_sequences = shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *shape[:2])
        n_sequences = len(cu_seqlens) - 1
    if h0 is not None and h0.shape != (n_sequences, *shape[2:]):
        raise ValueError(sentence("h0", kind_of(h0), f"{(n_sequences, *shape[2:])}, a state for each sequence"))


def _check_out(out: Tensor, a: Tensor, b: Tensor, h0: Tensor | None, dtype: torch.dtype, backend: str) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out, a, b, h0)):
        mend = "omit it or call under torch.no_grad()"
        raise RuntimeError(sentence("out", "given where a gradient is needed", "None", mend))
    if transforms_are_active():
        raise RuntimeError(sentence("out", "given under torch.func or forward derivatives", "None"))
    if backend != "numba":
        mend = "omit it, for only the CPU kernel writes into a given tensor"
        raise RuntimeError(sentence("out", f"given for the backend {backend!r}", "None", mend))
    if dtype in HALF:
        raise ValueError(sentence("out", kind_of(out), "None: float16 and bfloat16 cannot be written in place"))
    require_layout("out", out, tuple(b.shape), dtype, b.device)
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError(sentence("out", f"a view with strides {out.stride()}", "a contiguous tensor"))
