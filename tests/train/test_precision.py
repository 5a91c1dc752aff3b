"""`training.precision: auto`: what the machine is asked, what a run keeps, and what it is told."""

import io

import pytest
import torch
from rich.console import Console
from tests.train.runs.conftest import RECIPES

from recurra._process import has_native_bfloat16
from recurra.train import _ranks as precision
from recurra.train._ranks import settled
from recurra.train.config import TrainingConfig
from recurra.train.recipe import load_recipe
from recurra.train.run import resume_run, start_run


@pytest.fixture
def machine(monkeypatch):
    """machine(native): a machine with or without units for bfloat16, whatever this one has"""
    return lambda native: monkeypatch.setattr(precision, "has_native_bfloat16", lambda device: native)


def note_of(trainer) -> str:
    console = Console(file=io.StringIO(), width=1000)
    trainer.fit(console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("processor", "units", "onednn", "native"),
    [
        ("x86_64", True, True, True),
        ("AMD64", False, True, False),  # AVX-512 from before AVX512_BF16: oneDNN emulates
        ("x86_64", True, False, False),  # a limit by ONEDNN_MAX_CPU_ISA
        ("aarch64", False, True, True),
    ],
)
def test_a_cpu_is_asked_for_units_and_for_the_library_that_uses_them(monkeypatch, processor, units, onednn, native):
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: units)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert has_native_bfloat16("cpu") is native
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert has_native_bfloat16("cpu") is False


def test_the_device_that_trains_is_asked(monkeypatch):
    monkeypatch.setattr(precision, "has_native_bfloat16", lambda device: device == "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert settled(TrainingConfig(precision="auto")).precision == "bf16-mixed"
    assert settled(TrainingConfig(precision="auto", accelerator="cpu")).precision == "32-true"


def test_bfloat16_by_name_without_units_is_warned_about(machine, make_trainer):
    machine(False)
    said = note_of(make_trainer(max_steps=1, precision="bf16-mixed"))
    assert "warning: training.precision is bf16-mixed, and this CPU has no native bfloat16" in said
    assert "precision" not in note_of(make_trainer("plain", max_steps=1, precision="32-true"))
    machine(True)
    assert "precision" not in note_of(make_trainer("native", max_steps=1, precision="bf16-mixed"))


def test_a_run_keeps_its_precision_on_another_machine(machine, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPES["horizon"])
    machine(True)
    threads = str(torch.get_num_threads())  # a run sets those of its process, and this one has to keep its own
    run = start_run(recipe, tmp_path / "run", ["--training.precision", "auto", "--training.threads", threads])
    run.fit()
    assert load_recipe(run.folder.config).training.precision == "bf16-mixed"
    machine(False)
    for words in ([], ["--training.precision", "auto"]):
        resumed = resume_run(run.folder.path, overrides=[*words, "--training.max_steps", "3"])
        assert resumed.fabric._precision.precision == resumed.experiment.training.precision == "bf16-mixed"
        resumed.folder.unlock()
    assert load_recipe(run.folder.config).training.precision == "bf16-mixed"
    with pytest.raises(ValueError, match=r"training.precision \(was 'bf16-mixed', now '32-true'\)"):
        resume_run(run.folder.path, overrides=["--training.precision", "32-true"])
