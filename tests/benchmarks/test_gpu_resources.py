"""What ptxas's report says, and how many warps fit beside each other."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from benchmarks.gpu.resources import parsed, resident_warps

REPORT = """ptxas info    : Compiling entry function '_keys' for 'sm_90a'
ptxas info    : Function properties for _keys
    24 bytes stack frame, 64 bytes spill stores, 68 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers"""


def test_registers_and_spills_are_read():
    assert parsed(REPORT) == {"registers": 255, "stores": 64, "loads": 68}
    with pytest.raises(ValueError, match="no report of registers"):
        parsed("ptxas fatal")


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "target", "expected"),
    [
        (32, 0, 4, 90, 64),  # all that there are
        (128, 0, 4, 90, 16),  # 65,536 / (128 * 32)
        (255, 0, 4, 90, 8),  # as 256 registers
        (168, 0, 4, 90, 12),
        (32, 45 * 1024, 4, 90, 16),  # 228 KB hold four with 46 KB each
        (32, 45 * 1024, 4, 80, 12),
        (16, 0, 1, 90, 32),  # at most 32 programs
    ],
)
def test_resident_warps(registers, shared, warps, target, expected):
    assert resident_warps({"registers": registers, "shared": shared, "warps": warps}, target) == expected
