"""A sequence over several processes: states and gradients are those of the whole, with one exchange each way."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import Program, run_file

from recurra import linear_scan
from recurra.ops.scan.parallel import sharded_scan

WORLD = 4
BATCH, CHANNELS = 2, 5

# lengths of the pieces, type, shape of a (-1 for time), which ranks pass h0
CASES = {
    "two": ((18, 19), torch.float64, (BATCH, -1, CHANNELS), "first"),
    "two in float32": ((13, 8), torch.float32, (BATCH, -1, CHANNELS), "all"),
    "two without h0": ((7, 1), torch.float64, (BATCH, -1, CHANNELS), "none"),
    "four": ((11, 7, 1, 18), torch.float64, (BATCH, -1, CHANNELS), "all"),
    "four, complex": ((3, 9, 5, 6), torch.complex128, (BATCH, -1, CHANNELS), "all"),
    "four, complex in single": ((5, 5, 5, 5), torch.complex64, (BATCH, -1, CHANNELS), "first"),
    "four, gates for all sequences": ((3, 9, 5, 6), torch.complex128, (-1, 1), "all"),
    "four, gates for all times": ((3, 9, 5, 6), torch.float64, (CHANNELS,), "first"),
    "four, gate for all": ((3, 2, 5, 6), torch.float64, (1,), "all"),
    "four, empty pieces": ((0, 4, 0, 3), torch.float64, (BATCH, -1, CHANNELS), "first"),
    "four, empty at the end": ((2, 0, 4, 0), torch.complex128, (BATCH, -1, CHANNELS), "all"),
    "four, closed gates": ((4, 5, 3, 4), torch.float64, (BATCH, -1, CHANNELS), "first"),
    "four, long memory in bfloat16": ((9, 4, 3, 7), torch.bfloat16, (BATCH, -1, CHANNELS), "all"),
}
TOLERANCE = {torch.float64: 1e-13, torch.complex128: 1e-13, torch.bfloat16: 2e-2}


def pose(lengths, dtype, gate_shape, h0_where):
    """The whole sequence, drawn in double precision."""
    length = sum(lengths)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    a = torch.randn([length if n == -1 else n for n in gate_shape], dtype=wide)
    a = 0.97 * a / (0.3 + a.abs())  # magnitudes up to almost 1, so that states reach over several pieces
    if a.dim() == 3 and length == 16:
        a[:, 6] = 0.0  # the states before step 6 are forgotten, without a NaN in any gradient
    b, dh = torch.randn(2, BATCH, length, CHANNELS, dtype=wide).to(dtype)
    h0 = None if h0_where == "none" else torch.randn(BATCH, CHANNELS, dtype=wide).to(dtype)
    return {
        **{"lengths": lengths, "a": a.to(dtype), "b": b, "dh": dh, "h0": h0},
        **{"a_has_time": -1 in gate_shape, "h0_everywhere": h0_where == "all"},
    }


@pytest.fixture(scope="module")
def problems():
    torch.manual_seed(1)
    return {name: pose(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def solutions(problems, tmp_path_factory):
    """What each of four fresh processes wrote; they are started once for all tests."""
    folder = tmp_path_factory.mktemp("sharded")
    torch.save(problems, folder / "problems.pt")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # a free port
    file = Path(__file__).with_name("sharded_worker.py")
    programs = [run_file(file, rank, WORLD, store.port, folder) for rank in range(WORLD)]
    workers = [Program(program, folder, OMP_NUM_THREADS="1") for program in programs]
    ended = [worker.wait(300) for worker in workers]
    assert [worker.status for worker in ended] == [0] * WORLD, "\n".join(worker.stderr for worker in ended)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def of_the_whole(problem):
    leaves = {n: None if problem[n] is None else problem[n].clone().requires_grad_() for n in ("a", "b", "h0")}
    h = linear_scan(*leaves.values(), backend="reference")
    h.backward(problem["dh"])
    return {"h": h.detach(), **{n: None if x is None else x.grad for n, x in leaves.items()}}


@pytest.mark.parametrize("name", CASES)
def test_the_pieces_make_the_whole(name, problems, solutions):
    problem = problems[name]
    members = len(problem["lengths"])
    expected = of_the_whole(problem)
    tolerance = TOLERANCE.get(problem["b"].dtype, 3e-6)
    close = {"rtol": tolerance, "atol": tolerance}
    for first in range(0, WORLD, members):  # two pairs work side by side
        pieces = [solutions[rank][name] for rank in range(first, first + members)]
        torch.testing.assert_close(torch.cat([p["h"] for p in pieces], 1), expected["h"], **close)
        torch.testing.assert_close(torch.cat([p["b"] for p in pieces], 1), expected["b"], **close)
        gradients = [p["a"] for p in pieces]
        a = torch.cat(gradients, -2) if problem["a_has_time"] else torch.stack(gradients).sum(0)
        torch.testing.assert_close(a, expected["a"], **close)
        if expected["h0"] is not None:
            torch.testing.assert_close(pieces[0]["h0"], expected["h0"], **close)
            for other in pieces[1:]:
                assert (other["h0"] is not None) == problem["h0_everywhere"]
                assert other["h0"] is None or other["h0"].count_nonzero() == 0


@pytest.mark.parametrize("name", CASES)
def test_one_exchange_each_way(name, solutions):
    states = BATCH * CHANNELS
    for solution in solutions:
        assert solution[name]["forward"] == [2 * states + 1]
        assert solution[name]["backward"] == [states]


def test_errors_in_a_group(solutions):
    for rank, solution in enumerate(solutions):
        said = solution["complaints"]
        expected = "ValueError: requires_grad is True on ranks [1] of 4 alone; expected the same on every rank"
        assert said["uneven gradients"].startswith(expected), rank
        assert said["stranger"].startswith("TypeError: group is -100; expected a torch.distributed.ProcessGroup")
        assert "; expected a type no wider than a's and b's torch.float32" in said["wide h0"]
        assert said["shape of a"].startswith(
            "ValueError: a is float32 (3,) on cpu; expected a shape that broadcasts to b's"
        )
        assert said["backend"].startswith("ValueError: backend is 'fast'")
        assert said["second derivative"].startswith("NotImplementedError: sharded_scan can be differentiated once only")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_group_of_one(problems, backend):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in ("four", "four, complex", "four, gates for all times"):
            leaves = [problems[name][n].clone().requires_grad_() for n in ("a", "b", "h0")]
            h = sharded_scan(*leaves, group=dist.group.WORLD, backend=backend)
            h.backward(problems[name]["dh"])
            actual = {"h": h.detach(), **{n: x.grad for n, x in zip(("a", "b", "h0"), leaves)}}
            torch.testing.assert_close(actual, of_the_whole(problems[name]), rtol=1e-13, atol=1e-13)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("unchecked")
def test_without_processes():
    with pytest.raises(
        RuntimeError, match=r"not initialised in this process; .* call torch\.distributed\.init_process_group"
    ):
        sharded_scan(torch.ones(3), torch.ones(2, 4, 3), group=None)
