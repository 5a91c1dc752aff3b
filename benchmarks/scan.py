"""linear_scan beside the memory's own speed (torch.add into a given tensor) and beside other libraries' scans."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.table import Row
from benchmarks.timing import interleaved, median_ratio
from recurra import linear_scan

SHAPES = [(8, 1024, 512), (1, 65536, 512), (32, 1024, 64), (1, 1048576, 8)]
TARGETS = {torch.float32: 1.3, torch.complex64: 2.0}
NARROW_TARGET = 2.0  # one sequence of few channels has one job, which waits for each step's arithmetic


def _inputs(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    a = torch.rand(shape, dtype=real)
    return (torch.polar(a, torch.randn_like(a)) if dtype.is_complex else a), torch.randn(shape, dtype=dtype)


def _forward_backward(scan: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Callable[[], None]:
    a, b, gradient = a.clone().requires_grad_(), b.clone().requires_grad_(), torch.randn_like(b)

    def run() -> None:
        torch.autograd.grad(scan(a, b), (a, b), gradient)

    return run


def measure(rounds: int, peers: bool) -> Iterator[Row]:
    """Yield one row per shape, type and function: its time over that of torch.add on the same tensors."""
    for dtype in (torch.float32, torch.complex64):
        for shape in SHAPES:
            a, b = _inputs(shape, dtype)
            out = torch.empty_like(b)
            functions: dict[str, Callable[[], object]] = {
                "torch.add(a, b, out=c)": lambda a=a, b=b, out=out: torch.add(a, b, out=out),
                "linear_scan into out": lambda a=a, b=b, out=out: linear_scan(a, b, out=out),
                "linear_scan": lambda a=a, b=b: linear_scan(a, b),
                "linear_scan, forward + backward": _forward_backward(linear_scan, a, b),
            }
            if dtype == torch.float32:
                functions |= _halves(a, b)
            if peers and shape[0] > 1:
                functions |= _peers(a, b)
            seconds = interleaved(functions, rounds=rounds if not peers else max(5, rounds // 4))
            floor = seconds["torch.add(a, b, out=c)"]
            for name, times in seconds.items():
                target = NARROW_TARGET if shape[2] < 16 else TARGETS[dtype]
                what = f"{shape} {str(dtype).removeprefix('torch.')}"
                yield Row(
                    what,
                    name,
                    times,
                    median_ratio(times, floor),
                    target if name == "linear_scan into out" else None,
                    "at most",
                )


def _halves(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    """The same numbers in bfloat16 and float16."""
    functions: dict[str, Callable[[], object]] = {}
    for dtype in (torch.bfloat16, torch.float16):
        half_a, half_b = a.to(dtype), b.to(dtype)
        name = f"linear_scan in {str(dtype).removeprefix('torch.')}"
        functions[name] = lambda a=half_a, b=half_b: linear_scan(a, b)
        functions[f"{name}, forward + backward"] = _forward_backward(linear_scan, half_a, half_b)
    return functions


def _peers(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    import jax
    from gateloop_transformer.associative_scan import associative_scan

    def combine(earlier: tuple, later: tuple) -> tuple:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    def peer(a: Tensor, b: Tensor) -> Tensor:
        return associative_scan(combine, (a, b))[1]

    jax_a, jax_b = jax.numpy.asarray(a.numpy()), jax.numpy.asarray(b.numpy())
    compiled = jax.jit(lambda a, b: jax.lax.associative_scan(combine, (a, b), axis=1)[1])
    pulled_back = jax.jit(lambda a, b, g: jax.vjp(compiled, a, b)[1](g))
    return {
        "gateloop-transformer": lambda: peer(a, b),
        "gateloop-transformer, forward + backward": _forward_backward(peer, a, b),
        "jax.lax.associative_scan": lambda: compiled(jax_a, jax_b).block_until_ready(),
        "jax.lax.associative_scan, forward + backward": lambda: jax.block_until_ready(pulled_back(jax_a, jax_b, jax_b)),
    }
