"""What `import recurra` loads, and what it needs."""

import ast
import runpy
from importlib.metadata import version

import pytest
from tests.processes import SOURCE, in_new_interpreter

HEAVY = (
    "numba",
    "llvmlite",
    "triton",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "av",
    "matplotlib",
    "lightning",
    "lightning_fabric",
    "tokenizers",
    "tensorboard",
    "datasets",
    "rich",
    "jsonargparse",
)


def test_nothing_heavy_is_loaded_but_by_what_needs_it(run_python):
    program = f"""
import sys, torch, recurra
b = torch.ones(1, 2, 1)
for backend in ("reference", "auto"):
    print(*[m for m in {HEAVY} if m in sys.modules], backend)
    recurra.linear_scan(b, b, backend=backend)
print(*[m for m in {HEAVY} if m in sys.modules])
import recurra.data, recurra.video
print("av" in sys.modules)
"""
    assert run_python(program).split() == ["reference", "auto", "numba", "llvmlite", "False"]


def test_the_import_needs_nothing_heavy(run_python):
    """None of it installed, no compiler, no folder to write into: the import and a first step still work."""
    program = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY}))
import torch, recurra
y, state = recurra.create_mixer("gateloop", 4)(torch.ones(1, 2, 4))
print(*y.shape, *recurra.list_mixers())
"""
    printed = run_python(program, PATH="", HOME="/nonexistent", PYTHONDONTWRITEBYTECODE="1").split()
    assert printed[:3] == ["1", "2", "4"]
    assert "gateloop" in printed


def test_the_public_names():
    import recurra

    assert set(recurra.__all__) <= set(dir(recurra))
    assert {"linear_scan", "gate_loop", "list_mixers", "create_mixer"} <= set(recurra.__all__)
    assert all(callable(getattr(recurra, name)) for name in set(recurra.__all__) - {"state"})
    assert callable(recurra.state.detach)
    assert recurra.__version__ == version("recurra"), "src/recurra/__init__.py and pyproject.toml differ"


def test_the_package_alone_loads_no_torch():
    program = """
import sys, recurra
print("torch" in sys.modules, recurra.__version__ != "", "state" in dir(recurra))
print(recurra.state.__name__)  # nothing else has imported it yet
from recurra import linear_scan
print(linear_scan is recurra.linear_scan is recurra.ops.scan.operator.linear_scan)
print(*(getattr(recurra, name).__name__ for name in recurra.__all__))
from recurra.models import LanguageModel
print(LanguageModel.__name__, hasattr(recurra, 'nothing'), hasattr(recurra, '_nothing'))
"""
    printed = in_new_interpreter(program).split()
    assert printed[:5] == ["False", "True", "True", "recurra.state", "True"]
    names = ["create_mixer", "delta_rule", "gate_loop", "linear_scan", "list_mixers", "open_run"]
    assert printed[5:] == [*names, "recurra.state", "LanguageModel", "False", "False"]


def test_what_opens_runs_is_imported_when_it_is_first_asked_for(run_python):
    program = """
import sys
before = list(sys.meta_path)
import recurra
print("recurra.train.run" in sys.modules, sys.meta_path == before)
from recurra import open_run
print(open_run.__module__, hasattr(recurra, "nothing"))
import recurra.cli.generate, recurra.train.run, recurra.train.task
print(*recurra.train.task.experiment_names()[:1])
print("lightning_fabric" in sys.modules, "matplotlib" in sys.modules)
from recurra.pretrained import memory_horizon
memory_horizon().reset_contrast()
import torch
from recurra.decoding._program import lower_step
print(len(lower_step(lambda x: (x + x,), [torch.ones(2)]).instructions), "torch._dynamo" in sys.modules)
"""
    printed = run_python(program).split()
    assert printed[:4] == ["False", "True", "recurra.train.run", "False"]
    assert printed[4:] == ["induction", "False", "False", "1", "False"]


def test_a_checkpoint_can_be_written_where_recurra_is_not_installed(run_python):
    program = """
    import importlib.metadata
    known = importlib.metadata.version
    def version(name):
        if name == "recurra":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)
    importlib.metadata.version = version
    from recurra.cli import main
    from recurra.train.checkpoint import versions
    print(versions()["recurra"], main(["--version"]))
    """
    assert run_python(program).split() == ["recurra", version("recurra"), version("recurra"), "0"]


def test_python_m_recurra_is_the_command_line(monkeypatch, capsys):
    runpy.run_module("recurra.__main__", run_name="recurra.__main__")  # importing it runs nothing
    monkeypatch.setattr("sys.argv", ["recurra", "train", "nowhere.yaml"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recurra", run_name="__main__")
    assert ended.value.code == 2
    assert "recipe is nowhere.yaml, which is neither a file nor" in capsys.readouterr().err


@pytest.mark.parametrize("stub", sorted(SOURCE.rglob("__init__.pyi")), ids=lambda stub: stub.parent.name)
def test_no_exported_name_is_a_modules(stub):
    """Importing the module would put it in the place of what a lazy package exports under its name."""
    tree = ast.parse(stub.read_text())
    (names,) = (ast.literal_eval(line.value) for line in tree.body if isinstance(line, ast.Assign))
    modules = {path.stem for path in stub.parent.glob("*.py")} | {path.name for path in stub.parent.iterdir()}
    assert not modules & {name for name in names if (stub.parent.name, name) != ("recurra", "state")}


def test_a_model_and_a_stream_load_no_wing(run_python):
    program = """
    import sys
    from recurra.models import LanguageModel, LanguageModelConfig
    from recurra.streams import Stream
    Stream(LanguageModel(LanguageModelConfig(11, None, 1, 8, 8)).eval())
    wings = ("decoding", "data", "convert", "train", "video", "analysis", "serve", "cli")
    print(*(name for name in sys.modules if name.startswith(tuple(f"recurra.{wing}" for wing in wings))), "none")
    """
    assert run_python(program).split() == ["none"]
