"""All Triton kernels compile for two generations of cards, down to machine code; this needs Triton, but no card.

Beside the interpreter, which takes what a compiler refuses, this is what can be known without a card. The interpreter
runs the combinations of options; compiling takes seconds each, so here, with what is slow, every value of every option
occurs at least once with every kernel it applies to: card, types of numbers and gates, real and complex, scalar and
vector gates, and block sizes.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on", allow_module_level=True)
triton = pytest.importorskip("triton", reason="Triton is not installed here")

from benchmarks.gpu import resources  # noqa: E402
from benchmarks.gpu.resources import compiled_launch  # noqa: E402

from recurra.ops.cells import _gru_triton as gru_triton  # noqa: E402
from recurra.ops.gate_loop import _triton as fused_kernels  # noqa: E402
from recurra.ops.gate_loop import _triton_chunk as triton_chunk  # noqa: E402
from recurra.ops.gate_loop import _triton_chunk_backward as triton_chunk_backward  # noqa: E402
from recurra.ops.scan import _triton as scan_kernels  # noqa: E402

SHARED_MEMORY = 99 * 1024  # bytes that a program may have on every card from compute capability 8.0 on


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Make launches compile for `compiled.target` instead of running; collects the assembler text by kernel name."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    texts = {}

    def compile_call(kernel, *arguments, grid, warmup, num_warps, **constants):
        assert len(grid) == 1
        assert grid[0] > 0
        made = compiled_launch(kernel, arguments, constants, num_warps, texts["target"])
        assert made.asm["cubin"]
        assert made.metadata.shared <= SHARED_MEMORY
        texts[kernel.fn.__name__] = made.asm["ptx"]

    monkeypatch.setattr(triton.JITFunction, "run", compile_call)
    return texts


@pytest.mark.parametrize(
    ("target", "dtype"), [pytest.param(80, torch.complex64, marks=pytest.mark.slow), (90, torch.float64)], ids=str
)
def test_scan(compiled, target, dtype):
    compiled["target"] = target
    a, h0 = torch.zeros(1, 130, 64, dtype=dtype), torch.zeros(1, 64, dtype=dtype)
    scan_kernels.scan_into(a, a, a, h0, False)
    scan_kernels.scan_backward_into(a, a, h0, a, a, a, h0, True)
    assert set(compiled) == {"target", "_chunk_products", "_walk", "_walk_backward"}
    for name in ("_chunk_products", "_walk", "_walk_backward"):
        assert "cp.async" in compiled[name], "the reads of later steps are under way"


@pytest.mark.parametrize(
    ("target", "number", "plane", "is_complex"),
    [
        pytest.param(80, torch.float32, torch.float32, False, marks=pytest.mark.slow),
        (90, torch.bfloat16, torch.float32, True),
    ],
    ids=str,
)
def test_fused(compiled, target, number, plane, is_complex):
    compiled["target"] = target
    q, a = torch.zeros(1, 130, 64, dtype=number), torch.zeros(1, 130, 64, dtype=plane)
    x0 = torch.zeros(1, 64, dtype=plane)
    a_im, x0_im = (a, x0) if is_complex else (None, None)
    for h in (a, a[:, :1]):
        fused_kernels.forward_into(q, h, h, q, q, q, a, a_im, x0, x0_im)
    gradients = [q, q, q, a, a, x0, x0] if is_complex else [q, q, q, a, x0]
    fused_kernels.backward_into(gradients, q, q, q, q, a, a_im, a, a, x0, x0_im, a, a_im)
    assert set(compiled) == {"target", "_summarise", "_walk", "_forward", "_backward"}
    for name in ("_summarise", "_forward", "_backward"):
        assert "cp.async" in compiled[name], "the reads of later steps are under way"


@pytest.mark.parametrize("channels", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_single_steps(compiled, channels):
    """To the compiler, sizes of 1 are constants, and make separate kernels."""
    compiled["target"] = 80
    a, x0 = torch.zeros(2, 1, channels), torch.zeros(2, channels)
    scan_kernels.scan_into(a, a, a, x0, True)
    scan_kernels.scan_backward_into(a, a, x0, a, a, a, x0, False)
    fused_kernels.forward_into(a, a, a, a, a, a, a, a, x0, x0)
    fused_kernels.backward_into([a] * 5 + [x0] * 2, a, a, a, a, a, a, a, a, x0, x0, a, a)
    assert set(compiled) == {"target", "_walk", "_walk_backward", "_forward", "_backward"}


@pytest.mark.parametrize(
    ("target", "number", "plane", "d_qk", "d_v", "d_a"),
    [
        pytest.param(80, torch.float32, torch.float32, 128, 128, 1, marks=pytest.mark.slow),
        (80, torch.bfloat16, torch.float32, 64, 17, 64),
        pytest.param(90, torch.float16, torch.complex64, 5, 16, 1, marks=pytest.mark.slow),
        pytest.param(80, torch.complex64, torch.complex64, 16, 16, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chunk(compiled, target, number, plane, d_qk, d_v, d_a):
    compiled["target"] = target
    q, v = (torch.zeros(1, 130, 2, d, dtype=number) for d in (d_qk, d_v))
    a, state = torch.zeros(1, 130, 2, d_a, dtype=plane), torch.zeros(1, 2, d_qk, d_v, dtype=plane)
    y = v.to(plane) if plane.is_complex else v
    triton_chunk.forward_into(y, state, q, q, v, a, state)
    triton_chunk_backward.backward_into((q, q, v, a, state), y, state, q, q, v, a, state)
    assert set(compiled) == {"target", "_summarise", "_walk", "_forward", "_values", "_keys"}
    for name in ("_summarise", "_forward", "_values", "_keys"):
        assert "mma" in compiled[name], "matrix products run on tensor cores"


@pytest.mark.parametrize(
    ("target", "number", "size"),
    [(80, torch.bfloat16, 5), pytest.param(90, torch.float32, 380, marks=pytest.mark.slow)],
    ids=str,
)
def test_gru(compiled, target, number, size):
    compiled["target"] = target
    projected, h = torch.zeros(2, 3, 3 * size, dtype=number), torch.zeros(2, size)
    weights = torch.zeros(2 * size, size, dtype=number), torch.zeros(size, size, dtype=number)
    steps = gru_triton.forward(projected, h, *weights)
    gru_triton.backward(steps, *weights, torch.zeros(2, 3, size), h)
    assert set(compiled) == {"target", "_forward", "_backward"}
    for name in ("_forward", "_backward"):
        assert "mma" in compiled[name], "matrix products run on tensor cores"
        assert "cp.async" in compiled[name], "the next tiles of a matrix are under way"
        assert "bar.sync" in compiled[name], "channels wait for each other"


@pytest.mark.parametrize(
    ("target", "case", "is_pipelined"),
    [
        (80, "selective scan of 16 modes, float32", True),
        # a thread reads less than the 4 bytes of cp.async
        pytest.param(90, "selective scan of 16 modes, bfloat16", False, marks=pytest.mark.slow),
        pytest.param(90, "selective scan of 128 modes, float32", True, marks=pytest.mark.slow),
        pytest.param(90, "delta rule of 64, float32", True, marks=pytest.mark.slow),
        (80, "delta rule of 128, float32", True),
        (80, "delta rule of 64 by channel, float32", True),
        pytest.param(90, "delta rule of 256 by channel, float32", True, marks=pytest.mark.slow),
        (80, "delta rule of 128 in chunks, by channel", False),  # and the walk is pipelined, its preparation is not
        pytest.param(90, "delta rule of 128 in chunks, by channel, backward", False, marks=pytest.mark.slow),
        pytest.param(80, "delta rule of 64 in chunks, backward", False, marks=pytest.mark.slow),
        pytest.param(90, "delta rule of 64 in chunks", False, marks=pytest.mark.slow),
        pytest.param(80, "delta rule of 256, float32", True, marks=pytest.mark.slow),
    ],
)
def test_states_in_registers(target, case, is_pipelined, monkeypatch, tmp_path):
    """A state that a thread spills is read from memory and written to it at every step."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    texts, report = [], resources.report
    monkeypatch.setattr(resources, "report", lambda ptx, target: texts.append(ptx) or report(ptx, target))
    with resources.compiled(target) as found:
        resources.CASES[case][2]()
    assert set(found) == ({"_prepare", "_walk"} if "in chunks" in case else {"_forward", "_backward"})
    assert all(one["stores"] == one["loads"] == 0 and one["shared"] <= SHARED_MEMORY for one in found.values()), found
    assert not is_pipelined or all("cp.async" in ptx for ptx in texts), "the reads of later steps are under way"
