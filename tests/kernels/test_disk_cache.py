"""A cache on disk that is damaged or full costs time, and nothing else."""

import errno
import warnings

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

from recurra.kernels import disk_cache
from recurra.kernels.launch import compile_function


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


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "damage", [lambda old: b"", lambda old: old[: len(old) // 2], lambda old: b"\x80\x05" + b"?" * len(old)]
)
def test_a_damaged_file_is_made_anew(folder, suffix, damage):
    assert call_quietly() == (11, 0)
    assert call_quietly() == (11, 1)
    (file,) = folder.rglob(f"*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(
        RuntimeWarning, match=r"the compiled kernels in .* cannot be read \(\w+: .*compiled again"
    ) as told:
        assert call() == (11, 0)
    assert len(told) == 1
    assert call_quietly() == (11, 1)


@pytest.mark.parametrize("failing", ["_save_index", "_save_data"])
def test_on_a_full_disk_kernels_are_compiled_in_memory_with_one_warning(folder, monkeypatch, failing):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, failing, full)
        with pytest.warns(RuntimeWarning, match=r"cannot be written \(OSError: .*No space left on device\)") as told:
            assert [call(), call(plus_two)] == [(11, 0), (12, 0)]
        assert len(told) == 1
    assert [path for path in folder.rglob("*") if path.is_file()] == [], "no index without its data"
    assert [call_quietly(), call_quietly()] == [(11, 0), (11, 1)]
