"""The comparison with llama.cpp, with a stand-in for its side: sizes, bytes, turns, and what the page shows."""

import json
import math
import sys

import pytest
import torch
from benchmarks.llama_cpp_peer import SIZES, gpt2_tensors, mamba_tensors

from benchmarks import llama_cpp
from recurra.decoding.packing import pack_linear_layers
from recurra.models.registry import on_meta

STAND_IN = """#!{python}
import json, sys
if sys.argv[2] == "write":
    print(1000 * len(sys.argv[4]))
elif sys.argv[2] == "info":
    print(json.dumps({{"system": "AVX2 = 1"}}))
else:
    for line in sys.stdin:
        asked = json.loads(line)
        with open({log!r}, "a") as log:
            print(sys.argv[3], len(asked["prompt"]), asked["predict"], asked["keep"], file=log)
        n = asked["predict"]
        # 2 ms for each step; the first token takes none. Half of a prompt was read before.
        times = {{"prompt_n": len(asked["prompt"]) // 2, "prompt_ms": 30}}
        times |= {{"predicted_n": n, "predicted_ms": 2 * (n - 1)}}
        print(json.dumps(times), flush=True)
"""


def count(shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def test_their_models_have_the_published_sizes():
    assert count(gpt2_tensors(SIZES["gpt2"]._replace(positions=1024))) == 124_439_808
    with on_meta():
        ours = llama_cpp.mamba()
    assert count(mamba_tensors(SIZES["mamba"])) == sum(parameter.numel() for parameter in ours.parameters())


@pytest.fixture
def peer(tmp_path):
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    python.chmod(0o755)
    return python


def test_both_sides_take_blocks_in_turn(peer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp, "prepare", pack_linear_layers)
    threads = torch.get_num_threads()
    words = ["--dry", "--peer", str(peer), "--models", str(tmp_path / "gguf"), "--out", str(tmp_path / "found.json")]
    words += ["--contexts", "5", "9", "--prompt", "6", "--rounds", "2", "--threads", str(threads)]
    llama_cpp.main([*words, "--ours", "Mamba", "--theirs", "gpt2", "--numbers", "float32", "int8"])
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert list(found) == [
        "our Mamba, float32",
        "our Mamba, int8",
        *(f"llama.cpp gpt2, {n}" for n in ("F32", "Q8_0", "Q4_0")),
    ]
    assert found["llama.cpp gpt2, Q4_0"] == {"bytes": 4000, "prefill": 60.0, "5": [2.0, 2.0], "9": [2.0, 2.0]}
    assert all(len(values[context]) == 2 for values in found.values() for context in ("5", "9"))
    assert "llama.cpp gpt2, Q8_0" in shown
    assert "AVX2 = 1" in shown
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    first = [words[1:] for words in log if words[0].endswith("gpt2-F32.gguf")]
    assert first == [["6", "1", "False"], *[[context, "33", "True"] for context in "555999"]]
