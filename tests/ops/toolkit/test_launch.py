"""How kernels are run: over threads, beside other threads, in forked children, without a folder for compiled code."""

import importlib
import linecache
import shutil
import sys
import threading
from pathlib import Path

import numba
import pytest
import torch

import recurra
from recurra.ops._toolkit import cache as sources
from recurra.ops._toolkit import launch
from recurra.ops._toolkit.launch import Kernel

# What the programs below share. There is enough work for a kernel to use several threads, and little enough for torch
# to use one: in a forked child torch's own threads would hang.
PRELUDE = """
import os, sys, threading
import torch, recurra
from recurra.ops.gate_loop import Planes
from recurra.ops.gate_loop.fused import fused

shape = (2, 64, 200)
torch.manual_seed(0)
real = [torch.rand(shape), torch.randn(shape), torch.randn(2, 200)]
gates = torch.polar(torch.rand(shape), torch.randn(shape))
complex_ = [gates, torch.randn(shape, dtype=torch.complex64), torch.randn(2, 200, dtype=torch.complex64)]
q, k, v, a_re, a_im = torch.rand(5, *shape)
x0_re, x0_im = torch.randn(2, 2, 200)

def gradients(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    total = sum(x.abs().square().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, inputs)]

def scan(reverse):
    return lambda *x: (recurra.linear_scan(*x, reverse=reverse, backend="numba"),)

def gate_loop(q, k, v, a_re, a_im, x0_re, x0_im):
    result = fused(q, k, v, Planes(a_re, a_im), Planes(x0_re, x0_im), backend="numba")
    return result.y, *result.last

def gate_loop_real(q, k, v, a, x0):
    result = fused(q, k, v, Planes(a, None), Planes(x0, None), backend="numba")
    return result.y, result.last.re

operators = [
    (scan(False), real), (gate_loop, [q, k, v, a_re, a_im, x0_re, x0_im]),
    (scan(True), complex_), (gate_loop_real, [q, k, v, a_re, x0_re]),
]

def everything():
    return [result for operator in operators[:N_OPERATORS] for result in gradients(*operator)]

def same(results, expected):
    return len(results) == len(expected) and all(map(torch.equal, results, expected))

torch.set_num_threads(1)
expected = everything()
torch.set_num_threads(4)
"""
FOUR_THREADS = {"NUMBA_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"}


def loop(n, share):
    """The loop of a kernel that does nothing."""
    for _ in range(share[0], share[1]):
        pass


@pytest.fixture
def kernel(monkeypatch, set_threads):
    """A kernel that records whether threads ran."""
    kernel, taken = Kernel(loop), []

    def run(arguments, jobs, threads):
        taken.append("serial" if threads == 1 else ("parallel", numba.get_num_threads()))

    monkeypatch.setattr(kernel, "_run", run)
    kernel.taken = taken
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 2)
    monkeypatch.setattr(numba, "get_num_threads", lambda: set_to[-1])
    kernel.set_to = set_to = [1]
    monkeypatch.setattr(numba, "set_num_threads", set_to.append)
    set_threads(2)
    return kernel


def test_threads_run_where_there_is_work_for_them(kernel):
    kernel(5, jobs=4, work=1_000_000)
    assert kernel.taken == [("parallel", 2)]
    assert kernel.set_to == [1, 2, 1]  # the caller's own Numba code runs as before


def test_one_thread_runs_little_work_or_one_job(kernel):
    kernel(5, jobs=4, work=100)
    kernel(5, jobs=1, work=1_000_000)
    torch.set_num_threads(1)
    kernel(5, jobs=4, work=1_000_000)
    assert kernel.taken == ["serial"] * 3


def test_one_thread_runs_in_a_forked_child(kernel, monkeypatch):
    monkeypatch.setattr(launch, "is_forked_child", lambda: True)
    kernel(5, jobs=4, work=1_000_000)
    assert kernel.taken == ["serial"]


def test_one_thread_runs_beside_a_parallel_kernel(kernel):
    with launch._parallel_kernels:
        other = threading.Thread(target=kernel, args=(5,), kwargs={"jobs": 4, "work": 1_000_000})
        other.start()
        other.join()
    kernel(5, jobs=4, work=1_000_000)
    assert kernel.taken == ["serial", ("parallel", 2)]


def test_a_kernel_that_raises_leaves_the_threads_free(kernel, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(kernel, "_run", fail)
    with pytest.raises(MemoryError):
        kernel(5, jobs=4, work=1_000_000)
    assert not launch._parallel_kernels.locked()


ARGUMENTS = """
from collections import namedtuple
import numpy as np, torch
from recurra.ops._toolkit.launch import Kernel
from recurra.ops._toolkit.vectors import Lanes, load, store

ONE = Lanes("float64", 1)
Sizes = namedtuple("Sizes", ["first", "step"])

def fill(y, twice, some, sizes, negative, share):
    for job in range(share[0], share[1]):
        number = job * sizes.step + sizes.first + some[1]
        for _ in range(number):
            store(y, job, ONE, load(y, job, ONE) + load(twice, 0, ONE) * load(twice, 0, ONE))
        if negative < 0:
            store(y, job, ONE, load(y, job, ONE) + load(y, job, ONE))

kernel, three = Kernel(fill), np.array([3.0])
for threads in (1, 2):
    torch.set_num_threads(threads)
    for n in (1, 5, 40):
        for negative in (-0.5, 0.5, True):
            y = np.zeros(n)
            kernel(y.ctypes.data, three.ctypes.data, (100, 7), Sizes(1, 2), negative, jobs=n, work=1_000_000)
            np.testing.assert_array_equal(y, 9 * (2 * np.arange(n) + 8) * (2 if negative < 0 else 1))
print("filled")
"""


def test_a_kernel_gets_its_arguments_whole(run_python, tmp_path):
    (tmp_path / "filling.py").write_text(ARGUMENTS)
    program = "import sys; sys.path.insert(0, '.')\nimport filling"
    for _ in range(2):  # the second time from the disk
        assert run_python(program, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2").split() == ["filled"]


@pytest.mark.parametrize("n_operators", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_threads_and_forked_children(layer, n_operators, run_python):
    """With any number of threads, next to other threads and in forked children, results are the same bit for bit."""
    printed = run_python(
        f"N_OPERATORS = {n_operators}\n{PRELUDE}"
        + """
import multiprocessing, numba
from recurra.ops._toolkit.launch import Kernel

parallel = []
run = Kernel._run
def counted(self, arguments, jobs, threads):
    if threads > 1:
        parallel.append(jobs)
    run(self, arguments, jobs, threads)
Kernel._run = counted
for threads in (2, 3, 4):
    torch.set_num_threads(threads)
    parallel.clear()
    # forward and backward of each operator; rows are split if there are fewer sequences than threads
    right = same(everything(), expected) and len(parallel) == 2 * N_OPERATORS and (threads == 2 or max(parallel) > 2)
    print("threads", threads, right)
Kernel._run = run
print("layer", numba.threading_layer())

right = []
def work():
    right.append(all(same(everything(), expected) for _ in range(2)))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("beside each other", right == [True] * 4)

def child(task):
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = task()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

print("fork", child(lambda: same(everything(), expected)))
print("grandchild", child(lambda: child(lambda: same(everything(), expected)) == 0))

def compute(_):
    return same(everything(), expected)

with multiprocessing.get_context("fork").Pool(2) as pool:
    print("pool", pool.map(compute, range(2)))

stop, started = threading.Event(), threading.Event()
def busy():
    while not stop.is_set():
        everything()
        started.set()
thread = threading.Thread(target=busy)
thread.start()
started.wait()
print("beside a thread", [child(lambda: same(everything(), expected)) for _ in range(2)])
stop.set()
thread.join()
print("parent", same(everything(), expected))
""",
        NUMBA_THREADING_LAYER=layer,
        **FOUR_THREADS,
    )
    assert [f"threads {n} True" in printed for n in (2, 3, 4)] == [True] * 3
    assert layer == "default" or f"layer {layer}" in printed
    assert "beside each other True" in printed
    assert "fork 0" in printed
    assert "grandchild 0" in printed
    assert "pool [True, True]" in printed
    assert "beside a thread [0, 0]" in printed
    assert "parent True" in printed


def test_a_child_forked_before_the_first_kernel_runs_kernels(run_python):
    """A parent that has run only torch's own parallel operators already makes threads impossible in its child."""
    printed = run_python(
        """
import os, torch, recurra
torch.rand(4, 512, 512).square().sum()
assert torch.get_num_threads() > 1
pid = os.fork()
if pid == 0:
    b = torch.rand(2, 64, 200)
    ok = torch.equal(recurra.linear_scan(b, b, backend="numba"), recurra.linear_scan(b, b, backend="reference"))
    os._exit(0 if ok else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        **FOUR_THREADS,
    )
    assert "child 0" in printed


FIRST_CALLS = """
import threading, torch, recurra
b = torch.rand(2, 5, 3)
expected = recurra.linear_scan(b, b, backend="reference")
right = []
def first_call():
    right.append(torch.equal(recurra.linear_scan(b, b, backend="numba"), expected))
threads = [threading.Thread(target=first_call) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("right", right == [True] * 4, recurra.__file__)
"""


def test_threads_may_compile_a_kernel_at_once(tmp_path, run_python):
    assert "right True" in run_python(FIRST_CALLS, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("*.nbc")), "what was compiled is kept"


KERNEL = """
from recurra.ops._toolkit.launch import compile_function
from kernels_of_a_test.part import plus

@compile_function
def kernel(x):
    return plus(x)
"""
PART = """
from kernels_of_a_test.constant import CONSTANT
from recurra.ops._toolkit.launch import compile_inline

@compile_inline
def plus(x):
    return x + CONSTANT
"""
CONSTANT = "CONSTANT = 1\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package with a kernel in it, and nothing left of it afterwards."""
    folder = tmp_path / "kernels_of_a_test"
    folder.mkdir()
    for name, source in {"__init__.py": "", "kernel.py": KERNEL, "part.py": PART, "constant.py": CONSTANT}.items():
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    forget(folder)


def forget(folder: Path) -> None:
    """Leave as little of the package in this process as there is in a new one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]
    sources._source.cache_clear()
    sources._digest.cache_clear()
    linecache.checkcache()
    importlib.invalidate_caches()


def first_call(folder: Path) -> tuple[int, int]:
    """Import the kernel as a new process would and call it: what it gives for 10, and how often the disk had it."""
    forget(folder)
    kernel = importlib.import_module(f"{folder.name}.kernel").kernel
    return kernel(10), sum(kernel.stats.cache_hits.values())


@pytest.mark.parametrize("changed", ["part.py", "constant.py"])
def test_compiled_code_is_as_new_as_what_it_is_made_of(package, changed):
    """A kernel's cache on disk notices a change in a file that the kernel imports from, directly or not."""
    assert first_call(package) == (11, 0)
    assert first_call(package) == (11, 1), "unchanged, it comes from the disk"
    file = package / changed
    file.write_text(file.read_text().replace("+ CONSTANT", "- CONSTANT").replace("= 1", "= 2"))
    expected = 9 if changed == "part.py" else 12
    assert first_call(package) == (expected, 0)
    assert first_call(package) == (expected, 1)


SMALL_KERNEL = """
import numba
from recurra.ops._toolkit.launch import LoopKernel

def double(x):
    for i in numba.prange(len(x)):
        x[i] *= 2
kernel = LoopKernel(double)
"""


def test_parts_of_one_kernel_are_not_taken_for_those_of_another(tmp_path, run_python):
    """The form for one thread drops the argument that `fibonacci` ignores; the one for all threads passes it."""
    program = """
    import numba, numpy, torch
    from recurra.ops._toolkit.launch import LoopKernel, compile_part

    @compile_part
    def fibonacci(ignored, n):
        return n if n < 2 else fibonacci(ignored, n - 1) + fibonacci(ignored, n - 2)

    def write(ignored, ns, results):
        for i in numba.prange(len(ns)):
            results[i] = fibonacci(ignored[i], ns[i])

    torch.set_num_threads(2)
    kernel, ns = LoopKernel(write), numpy.arange(8)
    for work in (1, 10**6):
        results = numpy.zeros(8, int)
        kernel(numpy.ones(8), ns, results, jobs=8, work=work)
        print(results.tolist())
    """
    printed = run_python(program, NUMBA_CACHE_DIR=str(tmp_path / "cache"), OMP_NUM_THREADS="2")
    assert printed.split("\n")[:2] == ["[0, 1, 1, 2, 3, 5, 8, 13]"] * 2


def test_no_folder_for_compiled_code(tmp_path, run_python):
    """Neither next to the source nor in the user's folder: files stand in place of both folders."""
    copy = tmp_path / "package" / "recurra"
    shutil.copytree(Path(recurra.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "ops" / "_toolkit" / "small.py").write_text(SMALL_KERNEL)
    for folder in [p for p in copy.rglob("*") if p.is_dir()]:
        (folder / "__pycache__").write_text("in the way")
    nowhere = tmp_path / "file"
    nowhere.write_text("in the way")
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"), str(nowhere))
    program = """
    import numpy, recurra
    from recurra.ops._toolkit.small import kernel
    x = numpy.ones(3)
    kernel(x, jobs=3, work=3)
    print("right", x.tolist() == [2.0] * 3, recurra.__file__)
    """
    printed = run_python(program, PYTHONPATH=str(copy.parent), PYTHONDONTWRITEBYTECODE="1", **places)
    assert "right True" in printed
    assert str(copy) in printed
    assert not list(tmp_path.rglob("*.nbc"))
