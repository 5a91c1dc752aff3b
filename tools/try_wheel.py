"""Install a wheel into clean environments, one for each Python that there is, and do what the start page says.

    python -m tools.try_wheel dist/recurra-0.1.0-py3-none-any.whl

For a Python that this machine lacks, uv (if it is installed) looks whether every dependency has a package for it;
nothing is run there, and the report says so.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.start_page import Step, steps

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
EXTRAS = "train,plot,export"  # what the start page needs
LARGEST_MINUTES = 30


def main() -> None:
    """Try all, report each, and fail if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", action="append", metavar="3.N", help="only this version; may be repeated")
    arguments = parser.parse_args()
    failed = False
    for version in arguments.python or PYTHONS:
        python = find_python(version)
        try:
            report = try_in(python, arguments.wheel.resolve()) if python else resolve_for(version, arguments.wheel)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            report, failed = f"FAILED: {error}", True
        print(f"Python {version}: {report}", flush=True)
    raise SystemExit(failed)


def find_python(version: str) -> str | None:
    """Find an interpreter of a version, on the path or among pyenv's, that runs; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]:
        try:
            subprocess.run([python, "-c", "import venv, ensurepip"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


def try_in(python: str, wheel: Path) -> str:
    """Make an environment of its own, install the wheel, and do every step of the start page in an empty folder."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        _run([python, "-m", "venv", str(env)], folder)
        _install(env, [f"{wheel}[{EXTRAS}]"], folder)
        installed = time.monotonic()
        todo = [step for step in steps() if not step.installs]
        for step in todo:
            _run(_command(step, env), folder)
        _run([str(env / "bin" / "pip"), "check"], folder)
    ended = time.monotonic()
    return f"{len(todo)} steps of {ended - installed:.0f} s, after an installation of {installed - began:.0f} s"


def _install(env: Path, what: Sequence[str], folder: str) -> None:
    _run([str(env / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *what], folder)


def _command(step: Step, env: Path) -> list[str]:
    if step.python:
        return [str(env / "bin" / "python"), "-c", step.python]
    return [str(env / "bin" / step.words[0]), *step.words[1:]]


def _run(command: Sequence[str], folder: str) -> None:
    print("  $", *command[:6], file=sys.stderr, flush=True)
    subprocess.run(command, check=True, cwd=folder, timeout=60 * LARGEST_MINUTES, stdout=sys.stderr)


def resolve_for(version: str, wheel: Path) -> str:
    """Look whether every dependency has a package for a Python that is not here."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        return "not on this machine, and without uv its dependencies cannot be looked up"
    command = [uv, *f"pip compile -q --python-version {version} --only-binary :all: -c {CONSTRAINTS}".split()]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as requirements:
        requirements.write(f"recurra[{EXTRAS}] @ {wheel.resolve().as_uri()}\n")
        requirements.flush()
        found = subprocess.run([*command, requirements.name], capture_output=True, text=True)
    if found.returncode:
        raise subprocess.CalledProcessError(found.returncode, "uv pip compile", stderr=found.stderr)
    n_packages = sum("==" in line for line in found.stdout.splitlines())
    return f"not on this machine: not run; all {n_packages} dependencies have packages for it"


if __name__ == "__main__":
    main()
