"""What a card is measured with, on the CPU at tiny sizes: it must not fail on the card for a silly reason."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from tests.processes import Program

ROOT = Path(__file__).resolve().parents[2]
QUEUE = ROOT / "benchmarks" / "gpu_queue.sh"
STAGES = ["equality", "kernels", "graphs", "steps", "runs"]
PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.quick_interpreter import quick_interpreter
from benchmarks.gpu import __main__ as speed, golden, tuning
tuning.GAIN = float("inf")  # whatever is tried wins, however busy the machine
with quick_interpreter():
    assert golden.main(["--dry", "--part", "0/6", "--out", "golden.json"]) == 0
    assert speed.main(["--dry", "--types", "float32", "--out", "speed.json"]) == 0
    tuning.main(["--dry", "--out", "tiles.json"])
tuning.adopt(Path("tiles.json"), Path("table.json"))
"""


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The results of a dry form of everything that Python does."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    folder = tmp_path_factory.mktemp("dry")
    (folder / "table.json").write_text('{"format": 1, "devices": {"A card": {"capability": "9.0"}}}')
    program = f"import os\nos.chdir({str(folder)!r})\n{PROGRAM.format(root=str(ROOT))}"
    given = {"TRITON_INTERPRET": "1", "RECURRA_SHAPE_CHECKS": "0", "OMP_NUM_THREADS": "1"}
    ended = Program(program, folder, **given).wait(120)
    assert ended.status == 0, ended.said
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_a_sixth_of_the_kernels_is_compared(dry):
    results = dry["golden"]["results"]
    assert len({result["name"] for result in results}) == len(results) == 5
    assert all(result["equal"] for result in results)


def test_speeds_have_a_copy_beside_them(dry):
    sections = {title: rows for title, rows in dry["speed"].items() if title != "machine"}
    *own, others = sections.values()
    assert others == [], "other libraries need a card"
    for rows in own:
        assert rows[0]["name"].startswith("copy of as many bytes")
        assert all(row["gb_per_second"] > 0 and row["n_bytes"] > 0 for row in rows)
    names = " ".join(f"{row['what']} {row['name']}" for rows in sections.values() for row in rows)
    kinds = [f"{kind} gate a {per}" for kind in ("real", "complex") for per in ("head", "channel")]
    for word in (
        "selective_scan",
        "fused",
        "linear_scan",
        "complex64",
        "real gates",
        "complex gates",
        *kinds,
        "chunk, with gradients",
    ):
        assert word in names


def test_winners_go_into_the_kernels_table(dry):
    assert {"scan", "chunk"} < set(dry["tiles"]["devices"]["interpreter"])
    assert all("ratio" in one for one in dry["tiles"]["tried"])
    assert dry["table"]["devices"]["interpreter"] == dry["tiles"]["devices"]["interpreter"]
    assert "A card" in dry["table"]["devices"], "other cards stay"


def test_every_recipe_is_read_and_one_takes_steps(tmp_path, monkeypatch, unchecked):
    from benchmarks.gpu import steps

    monkeypatch.setattr(steps, "place", lambda dry: torch.device("cpu"))
    monkeypatch.chdir(ROOT)
    steps.main(["--dry", "--out", str(tmp_path / "steps.json")])
    results = json.loads((tmp_path / "steps.json").read_text())["results"]
    assert len({one["recipe"] for one in results}) == 9
    timed = [one for one in results if "tokens_per_second" in one]
    assert [one["precision"] for one in timed] == ["bf16-mixed", "32-true"]
    assert all(one["flops_per_token"] > 0 for one in timed)


STUB = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  *benchmarks.gpu.golden*) echo "$OMP_NUM_THREADS $NUMBA_NUM_THREADS threads" >>"$CALLS"; sleep 60;;
  "-m benchmarks.gpu "*) exit 3;;
  *"recurra train"*) mkdir -p "$6"; echo done >"$6/summary.json";;
esac
exit 0
"""


@pytest.fixture
def queue(tmp_path):
    """Run the queue with a stand-in for Python and a limit of a second for one stage; how each stage ended."""

    def run(stub: str, short: str, *words: str) -> dict[str, str]:
        python, copy = tmp_path / "python", tmp_path / "benchmarks" / "gpu_queue.sh"
        python.write_text(stub)
        python.chmod(0o755)
        copy.parent.mkdir()
        script, n_changed = re.subn(rf"(stage {short}) \d+", r"\1 1", QUEUE.read_text())
        assert n_changed
        copy.write_text(script)
        given = {"PYTHON": python, "CALLS": tmp_path / "calls", "OUT": tmp_path / "out", "RUNS": tmp_path / "runs"}
        environment = {**os.environ, **{name: str(path) for name, path in given.items()}}
        ended = subprocess.run(["bash", copy, *words], env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        stages = ["install", *([word for word in words if word != "--dry"] or STAGES)]
        summary = [line.split() for line in ended.stdout.splitlines()[-len(stages) :]]
        assert [words[0] for words in summary] == stages
        return {words[0]: words[-1] for words in summary}

    return run


@pytest.mark.parametrize("words", [["--dry"], []], ids=["dry", "card"])
def test_no_stage_stops_those_after_it(queue, tmp_path, words):
    """One hangs until its limit, one fails, and the rest run; every stage has its place in the summary."""
    ended = queue(STUB, "equality", *words)
    assert ended == dict.fromkeys(["install", *STAGES], "0") | {"equality": "124", "kernels": "3"}
    out, called = tmp_path / "out", (tmp_path / "calls").read_text()
    assert "2 2 threads" in called, "its processes share the cores"
    modules = (
        " ".join([f"benchmarks.{name}", *words, "--"]) for name in ("gpu.golden", "gpu", "gpu.graphs", "gpu.steps")
    )
    wanted = [*modules, "recurra train recipes/memory-horizon/data-controlled-muon.yaml"]
    places = [called.find(word) for word in wanted]
    assert min(places) > -1, called
    assert places == sorted(places)
    assert (out / "runs.tar.gz").stat().st_size > 0
    assert len(list(out.iterdir())) <= 8, "as many files as come back from a card"


@pytest.mark.parametrize("stage", ["tests", pytest.param("contracts", marks=pytest.mark.slow)])
def test_tests_that_are_cut_off_say_what_failed_so_far(queue, tmp_path, stage):
    """pytest and its workers report when they are interrupted, and not when they are terminated."""
    file = {"tests": "tests/ops", "contracts": "tests/contracts"}[stage]
    stub = f"""#!/usr/bin/env bash
case "$*" in *"-m pytest"*{file}*) trap "echo a reason; exit 2" INT; while true; do sleep 0.05; done;; esac
exit 0
"""
    assert queue(stub, stage, stage, "steps") == {"install": "0", stage: "124", "steps": "0"}
    assert "a reason" in (tmp_path / "out" / f"{stage}.txt").read_text()


def test_the_limits_of_all_stages_leave_time_for_the_runs():
    script = QUEUE.read_text()
    limits = {name: int(seconds) for name, seconds in re.findall(r"stage (\w+) (\d+) ", script)}
    left = int(re.search(r"LIMIT:-(\d+)", script)[1]) - sum(limits[name] for name in ("install", *STAGES[:-1]))
    assert left >= 200
