"""A cache on disk that is damaged or full costs time, and nothing else."""

import errno
import threading
import warnings
from contextlib import contextmanager

import numba
import pytest

from recurra.ops._toolkit import cache as disk_cache
from recurra.ops._toolkit.cache import _KeyedFiles
from recurra.ops._toolkit.launch import compile_function


def plus_one(x):
    return x + 1


def plus_two(x):
    return x + 2


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "_has_warned", False)
    return tmp_path


def call(function=plus_one):
    """Compile as a new process would; return the result and how often the code came from the disk."""
    compiled = compile_function(function)
    return compiled(10), sum(compiled.stats.cache_hits.values())


def call_quietly(function=plus_one):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(function)


def make_codes(folder, arguments):
    compiled = compile_function(plus_one)
    for argument in arguments:
        compiled(argument)
    return set(folder.rglob("*.nbc"))


@pytest.mark.parametrize(
    "damage", [lambda old: b"", lambda old: old[: len(old) // 2], lambda old: b"\x80\x05" + b"?" * len(old)]
)
def test_a_damaged_file_is_made_anew(folder, damage):
    assert call_quietly() == (11, 0)
    assert call_quietly() == (11, 1)
    (file,) = folder.rglob("*.nbc")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(
        RuntimeWarning, match=r"the compiled kernels in .* cannot be read \(\w+: .*compiled again"
    ) as told:
        assert call() == (11, 0)
    assert len(told) == 1
    assert call_quietly() == (11, 1)


def test_compiling_is_announced_once_and_reading_never(folder, monkeypatch, caplog):
    caplog.set_level("INFO", logger="recurra.kernels")
    monkeypatch.setattr(disk_cache, "_has_announced", False)
    call(), call(plus_two)
    (said,) = caplog.messages
    assert f"compiling kernels for this processor, which takes seconds; kept in {folder}" in said
    monkeypatch.setattr(disk_cache, "_has_announced", False)
    assert call() == (11, 1)
    assert len(caplog.messages) == 1


def test_each_kernel_is_named_while_it_is_compiled(folder, caplog):
    caplog.set_level("DEBUG", logger="recurra.kernels")
    call(), call(), call(plus_two)
    assert [said for said in caplog.messages if said.startswith("compiling ") and "." in said][-2:] == [
        f"compiling {plus_one.__module__}.plus_one",
        f"compiling {plus_two.__module__}.plus_two",
    ]


def test_on_a_full_disk_kernels_are_compiled_in_memory_with_one_warning(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_KeyedFiles, "_save_data", full)
        with pytest.warns(RuntimeWarning, match=r"cannot be written \(OSError: .*No space left on device\)") as told:
            assert [call(), call(plus_two)] == [(11, 0), (12, 0)]
        assert len(told) == 1
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert [call_quietly(), call_quietly()] == [(11, 0), (11, 1)]


def test_processes_that_write_at_once_keep_each_others_code(folder, monkeypatch):
    """Numba's own files lost one of two signatures here, or gave its number to the other's code."""
    both_write, plain = threading.Barrier(2), _KeyedFiles._open_for_write

    @contextmanager
    def together(self, path):
        with plain(self, path) as file:
            both_write.wait(timeout=60)
            yield file

    def files():
        return _KeyedFiles(str(folder), "kernel", (1, 2))

    with monkeypatch.context() as patch:
        patch.setattr(_KeyedFiles, "_open_for_write", together)
        writers = [threading.Thread(target=files().save, args=(key, f"code of {key}")) for key in ("float", "double")]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert [files().load(key) for key in ("float", "double", "half")] == ["code of float", "code of double", None]


def test_code_of_another_signature_or_of_older_sources_is_not_run(folder):
    (float_code,), double = make_codes(folder, [1.0]), make_codes(folder, [1.0, 1j])
    (double_code,) = double - {float_code}
    double_code.write_bytes(float_code.read_bytes())
    compiled = compile_function(plus_one)
    assert [compiled(1j), sum(compiled.stats.cache_hits.values())] == [1 + 1j, 0]
    newer = _KeyedFiles(str(folder), "kernel", (1, 2))
    newer.save("float", "code")
    assert _KeyedFiles(str(folder), "kernel", (1, 3)).load("float") is None


PARTS = """
from recurra.ops._toolkit.launch import compile_function, compile_part

def fibonacci(start):
    @compile_part
    def number(n):
        return start if n < 2 else number(n - 1) + number(n - 2)
    return number

ones, twos = fibonacci(1), fibonacci(2)

@compile_function
def of_ones(n):
    return ones(n)

@compile_function
def of_twos(n):
    return twos(n)
"""


def test_kernels_of_several_processes_keep_their_own_parts(folder, run_python):
    """Each of the first two compiles a kernel whose parts have the names of the other's; the others read both."""
    (folder / "parts.py").write_text(PARTS)
    program = """
    import os, sys
    import recurra.ops._toolkit.launch
    sys.path.insert(0, ".")
    expected = {"of_ones": 21, "of_twos": 42}
    for names in (["of_ones"], ["of_twos"], ["of_ones", "of_twos"], ["of_twos", "of_ones"]):
        child = os.fork()
        if not child:
            import parts
            kernels = [getattr(parts, name) for name in names]
            assert [kernel(7) for kernel in kernels] == [expected[name] for name in names], names
            assert len(names) == 1 or all(sum(kernel.stats.cache_hits.values()) == 1 for kernel in kernels)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, names
    """
    run_python(program, NUMBA_CACHE_DIR=str(folder))
