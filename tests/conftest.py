"""Shared by all tests: run-time checks of the shapes in signatures, one start for every test, the corpora's folder."""

import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from tests import shape_checks
from tests.processes import Program

# A pool of compilers in every worker would only compete with the other workers for the cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The user's cache folder is one of this process and those that its tests start.
# Matplotlib keeps its own: its list of fonts takes seconds to make.
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "matplotlib")
)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="recurra-tests-")

if os.environ.get("RECURRA_SHAPE_CHECKS", "1") == "1":
    shape_checks.install()

import jaxtyping
import torch

# What torch loads never dies: going through its million objects again and again takes a tenth of the time.
gc.set_threshold(50_000, 20, 50)
gc.freeze()

_ENVIRONMENT = {*os.environ} - {"PYTEST_CURRENT_TEST"}  # torch and lightning add more
_SLOW = [hypothesis.HealthCheck.too_slow]
ROOT = Path(__file__).resolve().parents[1]


# Every run draws the same examples, however loaded the machine is. `make test-ten` draws others.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=_SLOW)
hypothesis.settings.register_profile("explore", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    # pytest-randomly draws the order; what is drawn inside a test is _seed's business.
    config.option.randomly_reset_seed = False


def pytest_unconfigure():
    gc.freeze()  # pytest collects garbage five times at the end
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_terminal_summary(terminalreporter, config):
    seed, hashes = config.getoption("randomly_seed", None), os.environ.get("PYTHONHASHSEED", "random")
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"The order was --randomly-seed={seed}, with PYTHONHASHSEED={hashes}.")


def _seed() -> None:
    random.seed(0)  # beartype looks at one element of a list, which it draws by this
    np.random.seed(0)  # noqa: NPY002
    if torch.cuda.is_initialized():
        torch.manual_seed(0)
    else:  # a millisecond less: it would note for every device, with the whole stack, that a seed is to be set later
        torch.default_generator.manual_seed(0)


@contextmanager
def _drawn_apart():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    threads = torch.get_num_threads()  # which a run sets
    _seed()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
        torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Numbers that a file of tests draws when it is imported do not depend on the files before it."""
    with _drawn_apart():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Numbers that a shared fixture draws do not depend on the test that asks for it first."""
    if fixturedef.scope == "function":
        return (yield)
    with _drawn_apart():
        return (yield)


def _global_settings() -> dict:
    return {
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "shape checks off": jaxtyping.config.jaxtyping_disable,
        **{name: os.environ.get(name) for name in _ENVIRONMENT},
    }


@pytest.fixture(autouse=True)
def _alone(request):
    """Start each test from the same random numbers, and let none leave a setting changed for the next."""
    _seed()
    compiled = request.node.get_closest_marker("compile") is not None
    shape_checks.begin_test(checked=not compiled)
    if compiled and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    before = _global_settings()
    yield
    assert _global_settings() == before


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder with the real corpora: $RECURRA_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("RECURRA_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the real corpora: {folder} does not exist; set RECURRA_DATA to their folder")
    return folder


@pytest.fixture
def unchecked(monkeypatch):
    """Bad input is to reach the library's own checks, which the run-time shape checks would forestall."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def restored(monkeypatch):
    """Give a registry back its entries after the test: all of them, for no module registers what it has twice."""
    return lambda registry: monkeypatch.setattr(registry, "_entries", {name: registry[name] for name in registry})


@pytest.fixture
def set_threads():
    """A function that sets the number of threads of this process; they are put back, also if the test trains a run."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory():
    """Fill every fresh tensor with NaN, so that an element that nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_python(tmp_path) -> Callable[..., str]:
    """Run a program in a new process and return what it printed; a crash fails the test and not the run."""

    def run(program: str, **environment: str) -> str:
        ended = Program(program, tmp_path, **environment).wait()
        assert ended.status == 0, ended.said
        return ended.stdout + ended.stderr

    return run


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter():
    """Triton's interpreter repeats much in every operation, but not here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield
