"""`python -m tools.aarch64`: every kernel on an emulated 64-bit ARM processor, compared with this machine.

It needs qemu's user emulation and a cross compiler: on Debian `apt-get install qemu-user gcc-aarch64-linux-gnu`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_LIMIT = 1e-4
_NEUTRAL = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
"""Code without the instructions of one machine, which LLVM can translate for another."""


def main() -> int:
    """Print a table, and return 1 if a kernel's numbers differ, 2 if something is missing."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from tools.aarch64.cases import cases
    from tools.aarch64.emulated import COMPILER, CPU, EMULATOR, operations, run
    from tools.aarch64.recorded import Call, record

    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        print(
            f"{', '.join(missing)} not found; on Debian: apt-get install qemu-user gcc-aarch64-linux-gnu",
            file=sys.stderr,
        )
        return 2
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table, failed = Table("call", "kernel", "on vectors", "on single numbers", "difference", title=CPU), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases():
            if len(sys.argv) > 1 and sys.argv[1] not in name:
                continue
            calls: list[Call] = []
            with record(calls):
                case()
            for call in calls:
                assembly, worst = run(call, Path(folder))
                failed += not worst < _LIMIT
                vectors, singles = operations(assembly)
                table.add_row(name, call.kernel, str(vectors), str(singles), f"{worst:.1e}")
    Console(width=140).print(table)
    print(f"{failed} of {len(table.rows)} calls differ by more than {_LIMIT}")
    return 1 if failed else 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in _NEUTRAL.items()):
        arguments = [sys.executable, "-m", "tools.aarch64", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as cache:  # code from the cache has no LLVM text
            sys.exit(subprocess.run(arguments, env={**os.environ, **_NEUTRAL, "NUMBA_CACHE_DIR": cache}).returncode)
    sys.exit(main())
