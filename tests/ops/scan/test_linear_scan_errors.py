"""Bad input and backends that cannot run: each error names the argument, what came and what was expected."""

import warnings

import pytest
import torch
from tests.processes import Program

from recurra import linear_scan
from recurra.ops._toolkit import backends
from recurra.ops._toolkit.backends import choose_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def ones(*shape, **options):
    return torch.ones(shape, **options)


B = ones(2, 4, 3)
BAD_INPUT = [
    ((0.5, B), {}, TypeError, r"a is a float; expected a torch\.Tensor"),
    ((ones(3), [1.0]), {}, TypeError, "b is a list"),
    ((ones(3), B, (1,)), {}, TypeError, "h0 is a tuple"),
    ((ones(3, dtype=torch.int64), B), {}, TypeError, r"a is int64 \(3,\) on cpu; expected float16, .*a\.float\(\)"),
    ((ones(3), B.int()), {}, TypeError, "b is int32"),
    ((ones(3, device="meta"), B), {}, ValueError, r"a is float32 \(3,\) on meta; expected a tensor on cpu, as b"),
    ((ones(3), B, ones(2, 3, device="meta")), {}, ValueError, r"h0 is float32 \(2, 3\) on meta"),
    ((ones(3), ones(4)), {}, ValueError, r"b is float32 \(4,\) on cpu; expected \(B, L, \*channels\)"),
    ((ones(2), B), {}, ValueError, r"a is .*; expected a shape that broadcasts to b's \(2, 4, 3\)"),
    ((ones(2, 5, 3), B), {}, ValueError, r"a is float32 \(2, 5, 3\)"),
    ((ones(5), ones(2, 0, 3)), {}, ValueError, r"a is float32 \(5,\)"),
    (
        (ones(3), B, ones(2, 1, 3)),
        {},
        ValueError,
        r"h0 is .*; expected \(2, 3\), a state for each sequence",
    ),
    ((ones(3), ones(2, 0, 3), ones(2, 4)), {}, ValueError, r"h0 is float32 \(2, 4\)"),
    (
        (ones(3), B),
        {"backend": "fast"},
        ValueError,
        "backend is 'fast'; expected one of auto, reference",
    ),
    ((ones(3).to("meta"), B.to("meta")), {"backend": "triton"}, RuntimeError, "backend is 'triton'; expected 'auto'"),
    ((ones(3).to("meta"), B.to("meta")), {"backend": "numba"}, RuntimeError, "Numba's kernels run on the CPU, .* meta"),
    ((ones(3), B), {"out": ones(2, 4, 2)}, ValueError, "out is .*; expected float32"),
    ((ones(3), B), {"out": B.double()}, ValueError, "out is float64"),
    ((ones(3).half(), B.half()), {"out": B.half()}, ValueError, "out is float16 .* cannot be written in place"),
    ((ones(3), B), {"out": ones(2, 4, 6)[..., ::2]}, ValueError, "out is a view .*; expected a contiguous tensor"),
    ((ones(3), B + 0j), {"out": (B + 0j).conj()}, ValueError, "out is a view"),
    ((ones(3), B), {"out": B, "backend": "reference"}, RuntimeError, "out is given for the backend 'reference'"),
    ((ones(3, requires_grad=True), B), {"out": B}, RuntimeError, "out is given where a gradient is needed"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("arguments", "options", "kind", "message"), BAD_INPUT, ids=range(len(BAD_INPUT)))
def test_bad_input(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        linear_scan(*arguments, **options)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: lambda b: torch.func.jvp(f, (b,), (b,))])
def test_out_takes_no_transforms(transform):
    with pytest.raises(RuntimeError, match=r"out is given under torch\.func or forward derivatives; expected None"):
        transform(lambda b: linear_scan(ones(3), b, out=ones(1, 4, 3)))(ones(1, 1, 4, 3))


def test_out_without_gradients():
    with torch.no_grad():
        h = linear_scan(torch.ones(3, requires_grad=True), ones(2, 4, 3), out=ones(2, 4, 3))
    assert torch.equal(h[0, :, 0], torch.arange(1.0, 5.0))


def test_the_backend_follows_the_device():
    assert choose_backend("auto", CPU) == "numba"
    assert choose_backend("auto", torch.device("meta")) == "reference"
    assert choose_backend("reference", GPU) == "reference"
    with pytest.raises(RuntimeError, match=r"backend is 'numba'; .*: Numba's kernels run on the CPU, .* on cuda:0"):
        choose_backend("numba", GPU)


def test_without_numba_auto_warns_once_and_a_name_raises(monkeypatch):
    monkeypatch.setattr(backends, "NUMBA_IS_MISSING", "Numba is not installed")
    monkeypatch.setattr(backends, "_has_warned", False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            h = linear_scan(torch.tensor([0.5]), ones(1, 4, 1))
            choose_backend("reference", CPU)
            choose_backend("auto", torch.device("meta"))
    assert torch.equal(h.flatten(), torch.tensor([1.0, 1.5, 1.75, 1.875]))
    (warned,) = [w for w in seen if w.category is not ResourceWarning]  # of what another test left to be collected
    assert warned.category is RuntimeWarning
    assert "Numba is not installed" in str(warned.message)
    with pytest.raises(RuntimeError, match=r"backend is 'numba'; expected 'auto' or 'reference': Numba is not"):
        linear_scan(torch.tensor([0.5]), ones(1, 4, 1), backend="numba")


def test_an_interpreter_without_numba(run_python):
    printed = run_python("""
        import sys
        for name in ("numba", "llvmlite"):
            sys.modules[name] = None        # as if they were not installed
        import torch, recurra

        b = torch.ones(1, 4, 1, requires_grad=True)
        h = recurra.linear_scan(torch.tensor([0.5]), b)
        h.sum().backward()
        print(h.flatten().tolist(), b.grad.flatten().tolist())
        y, state = recurra.gate_loop(*(torch.ones(1, 3, 2, 1) for _ in range(4)))
        print(y.flatten().tolist())
        mixer = recurra.create_mixer("gateloop", 4)
        print(mixer(torch.ones(1, 3, 4))[0].shape)
        for call in (
            lambda: recurra.linear_scan(b, b, backend="numba"),
            lambda: recurra.gate_loop(*[b[..., None]] * 4, backend="numba"),
        ):
            try:
                call()
            except RuntimeError as error:
                print(error)
    """)
    assert "[1.0, 1.5, 1.75, 1.875] [1.875, 1.75, 1.5, 1.0]" in printed
    assert "[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]" in printed
    assert "torch.Size([1, 3, 4])" in printed
    assert printed.count("backend is 'numba'; expected 'auto' or 'reference': Numba is not installed") == 2
    assert printed.count("RuntimeWarning") == 1, printed
    assert "<string>:8: RuntimeWarning: Numba is not installed" in printed, "it points at the line that called"


def test_where_numba_compiles_nothing_the_reference_runs(tmp_path):
    """NUMBA_DISABLE_JIT, the switch for debuggers, would run kernels as Python, which addresses do not survive."""
    program = """
    import torch, recurra
    a = torch.rand(2, 5, 3)
    h = recurra.linear_scan(a, a)
    assert torch.equal(h, recurra.linear_scan(a, a, backend="reference"))
    try:
        recurra.linear_scan(a, a, backend="numba")
    except RuntimeError as error:
        print(error)
    """
    ended = Program(program, tmp_path, NUMBA_DISABLE_JIT="1").wait()
    assert ended.status == 0, ended.said
    assert "Numba compiles nothing (NUMBA_DISABLE_JIT is set)" in ended.stdout
