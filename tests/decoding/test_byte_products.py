"""Products of rounded numbers with the instructions of other machines: the numbers of this one."""

import pytest
import torch
from tests.processes import Program, run_file
from torch import nn

from recurra.decoding.linear import BLOCK, DecodingLinear

OTHERS = {  # whose products of bfloat16 are one code
    "AVX2": ("haswell", "+avx2,+fma"),
    "SSE4": ("nehalem", "+sse4.2"),
    "AVX2 and VNNI": ("alderlake", "+avx2,+fma,+avxvnni"),
}
_PROGRAM = """
import sys
import torch
from recurra.decoding.linear import PANEL, QUAD
from recurra.decoding._products import _HAS_PAIRS, _PER_PRODUCT, PAIRS_RECORD, RECORD, round_inputs, round_to_pairs
from recurra.decoding._tiles import BFLOAT16, EXPANDED_BYTES, INT8, expand, expanded_four, int4_two
from recurra.ops._toolkit.launch import compile_function

int8_two, bfloat16_two = INT8[-2], BFLOAT16[-2]

@compile_function
def int8(w, x, n_in, records, sums):
    round_inputs(x, n_in, 2, records)
    int8_two(w, records, RECORD, sums, (n_in + 3) // 4, w)

@compile_function
def bfloat16(w, x, n_in, records, sums):
    round_to_pairs(x, n_in, 2, records)
    bfloat16_two(w, records, PAIRS_RECORD, sums, (n_in + 1) // 2, w)

@compile_function
def int4(w, x, n_in, records, sums):
    round_inputs(x, n_in, 2, records)
    int4_two(w, records, RECORD, sums, 1, w)
    expanded = records + 4 * RECORD
    expand(w, expanded, w)
    expanded_four(expanded, records, RECORD, sums + 4 * 2 * 64, 32, w)

cases, results = torch.load(sys.argv[1]), []
for dtype, stored, scale, bias, x in cases:
    room = 4 * max(RECORD, PAIRS_RECORD) + EXPANDED_BYTES
    sums, records = torch.zeros(6, PANEL), torch.zeros(room, dtype=torch.uint8)
    kernel = {"bfloat16": bfloat16, "int8": int8, "int4": int4}[dtype]
    kernel(stored.data_ptr(), x.data_ptr(), x.shape[1], records.data_ptr(), sums.data_ptr())
    assert dtype != "int4" or torch.equal(sums[2:4], sums[:2])
    results.append(sums[:2, : len(scale)] * scale + bias)
torch.save((_PER_PRODUCT, _HAS_PAIRS, results), sys.argv[2])
"""


@pytest.mark.parametrize("machine", OTHERS)
def test_other_instructions_give_the_same(machine, tmp_path):
    name, features = OTHERS[machine]
    dtypes = ("bfloat16", "int8", "int4") if machine == "AVX2" else ("int8", "int4")
    layers = [DecodingLinear(nn.Linear(n, 33), dtype) for dtype in dtypes for n in (5, BLOCK - 3, BLOCK)]
    given = [(layer, torch.randn(2, layer.in_features)) for layer in layers]
    torch.save([(layer.dtype, layer.stored, layer.scale, layer.bias, x) for layer, x in given], tmp_path / "cases")
    (tmp_path / "program.py").write_text(_PROGRAM)  # kernels are cached by the file that they are in
    program = run_file(tmp_path / "program.py", tmp_path / "cases", tmp_path / "results")
    told = Program(program, tmp_path, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features).wait()
    if "unknown" in told.stderr or told.status == -4:
        pytest.skip(f"this processor cannot run the code of {name}")
    assert told.status == 0, told.said
    per_product, has_pairs, results = torch.load(tmp_path / "results")
    assert not has_pairs
    assert per_product == (8 if "avxvnni" in features else 0)
    for (layer, x), y in zip(given, results, strict=True):
        with torch.no_grad():
            error = 1e-5 if layer.dtype == "bfloat16" else 1e-6  # pairs are added in another order
            torch.testing.assert_close(y, layer(x), rtol=error, atol=error)
