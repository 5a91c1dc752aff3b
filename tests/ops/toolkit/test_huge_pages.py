"""Large results ask for huge pages, in their own memory alone."""

import mmap

import pytest
import torch

from recurra.ops._toolkit import memory
from recurra.ops._toolkit.memory import empty_result

HUGE = 2**21


@pytest.fixture
def asked(monkeypatch):
    """Collect what the system would be asked for."""
    calls = []
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize("shape", [(2**21 + 1,), (3, 2**20), (2**22 - 7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_whole_pages_inside_of_the_result(shape, dtype, asked):
    result = empty_result(torch.empty(shape, dtype=dtype))
    assert (result.shape, result.dtype, result.is_contiguous()) == (torch.Size(shape), dtype, True)
    ((start, size, advice),) = asked
    first, after = result.data_ptr(), result.data_ptr() + result.nbytes
    assert start % HUGE == size % HUGE == 0
    assert first <= start < first + HUGE
    assert after - HUGE < start + size <= after
    assert advice == mmap.MADV_HUGEPAGE


def test_small_results_and_other_devices_ask_for_nothing(asked):
    empty_result(torch.empty(2**21 - 1))
    empty_result(torch.empty(2**22, device="meta"))
    assert not asked


def test_a_system_without_them_is_not_asked(monkeypatch, tmp_path):
    for setting in ("always [never] madvise", "[always] madvise never", None):
        memory._madvise.cache_clear()
        file = tmp_path / "enabled"
        file.unlink(missing_ok=True)
        if setting is not None:
            file.write_text(setting)
        monkeypatch.setattr(memory, "_SETTING", file)
        assert memory._madvise() is None
    memory._madvise.cache_clear()
