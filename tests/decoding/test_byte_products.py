"""Products of whole numbers with the instructions of other machines: the numbers of this one."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from recurra.decoding.linear import DecodingLinear

SIZES = [(3, 5, 1), (130, 33, 2), (257, 129, 4), (70, 65, 9), (64, 64, 23)]
OTHERS = {"AVX2": ("haswell", "+avx2,+fma"), "AVX2 and VNNI": ("alderlake", "+avx2,+fma,+avxvnni")}
_PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
from recurra.decoding.products import _PER_PRODUCT
from recurra.decoding.matvec import _int4, _int8, room_bytes
cases, results = torch.load(sys.argv[1]), []
for numbers, stored, scale, bias, x in cases:
    y = torch.empty(len(x), len(scale))
    room = torch.zeros(room_bytes(*x.shape) // 4)
    end = room.data_ptr() + 4 * len(room)
    places = [tensor.data_ptr() for tensor in (stored, scale, bias, x, y)]
    kernel = _int4 if numbers == "int4" else _int8
    kernel(*places, len(x), x.shape[1], len(scale), 0, len(scale), room.data_ptr(), end)
    results.append(y)
torch.save((_PER_PRODUCT, results), sys.argv[2])
"""


def cases(kinds):
    for numbers in kinds:
        for n_in, n_out, vectors in SIZES:
            yield DecodingLinear(nn.Linear(n_in, n_out), numbers), torch.randn(vectors, n_in)


@pytest.mark.parametrize("machine", OTHERS)
def test_other_instructions_give_the_same(machine, tmp_path):
    name, features = OTHERS[machine]
    given = list(cases(["int8"] if "vnni" in features else ["int8", "int4"]))  # each takes seconds to compile
    torch.save([(layer.dtype, layer.stored, layer.scale, layer.bias, x) for layer, x in given], tmp_path / "cases")
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "cases"), str(tmp_path / "results")],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "unknown" in told.stderr or told.returncode == -4:
        pytest.skip(f"this processor cannot run the code of {name}")
    assert told.returncode == 0, told.stderr
    per_product, results = torch.load(tmp_path / "results")
    assert per_product == (8 if "avxvnni" in features else 0)
    for (layer, x), y in zip(given, results):
        with torch.no_grad():
            torch.testing.assert_close(y, layer(x), rtol=1e-6, atol=1e-6)
