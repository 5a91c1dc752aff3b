"""Formulas reach torch's FLOP counter whichever is loaded first, the package or the counter."""

COUNT = """
from torch.utils.flop_counter import FlopCounterMode
a = torch.ones(2, 5, 7)
{made}
with counted:
    recurra.linear_scan(a, a, backend="numba")
    recurra.gate_loop(*(a[..., None] for _ in range(4)), backend="numba")
print(counted.get_total_flops(), flush=True)
"""
NEW = "counted = FlopCounterMode(display=False)"
CASES = {
    "recurra, the counter": "import recurra\nimport torch.utils.flop_counter" + COUNT.format(made=NEW),
    "the counter, recurra": "import torch.utils.flop_counter\nimport recurra" + COUNT.format(made=NEW),
    "a counter before the first call": "import recurra"
    + COUNT.format(made=NEW + "\nrecurra.linear_scan(a, a, backend='numba')"),
}


def test_whichever_comes_first(run_python):
    """Each in a child of one process, which has imported what counters and kernels import, and has begun to compile."""
    program = f"""
import os, sys, torch, torch._dynamo, numba
assert not {{"recurra", "torch.utils.flop_counter"}} & set(sys.modules)
numba.njit(lambda: 0)()
for name, case in {CASES}.items():
    print(name, end=": ", flush=True)
    child = os.fork()
    if not child:
        exec(case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    printed = run_python(program)
    assert printed.splitlines() == [f"{name}: 420" for name in CASES]  # 2 and 4 for each of 70 numbers
