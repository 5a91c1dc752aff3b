"""Damaged files: each is refused in one sentence that names it, or read as what was written."""

import warnings
from dataclasses import replace

import pytest
from benchmarks.faults.binary_mutants import DAMAGES, SAFETENSORS
from benchmarks.faults.kinds import all_kinds
from benchmarks.faults.mutants import CSV, JSON, TEXT, mutants
from benchmarks.faults.outcomes import EQUAL, REFUSED, tally_mutants

N_MUTANTS = 16
ALL = all_kinds()
REMADE = ("encoded text", "header of encoded text")
FOLDERS = tuple(name for name in ALL if name.startswith("folder for transformers, "))
BARE_FOLDERS = tuple(name for name in FOLDERS if "manifest" not in name)
SLOW = ("ONNX", "checkpoint of adapters", *(name for name in ALL if "published" in name or "shards" in name))


@pytest.fixture(autouse=True)
def settings(unchecked, set_threads):
    """What is damaged is to reach the library's own checks, and a run that is resumed sets the number of threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ALL])
def test_it_is_refused_or_read_as_it_was(tmp_path, name):
    n_mutants = N_MUTANTS if name != "checkpoint, resumed from" else len(SAFETENSORS)
    tally = tally_mutants(ALL[name], tmp_path, n_mutants, seed=1)
    assert tally.examples == []
    assert tally.bad == 0
    if name in REMADE:
        assert tally.counts == {EQUAL: tally.counts.total()}
    else:
        assert tally.counts[REFUSED] > n_mutants // 4, "the mutators do their work"


@pytest.mark.parametrize("name", BARE_FOLDERS)
def test_a_folder_without_a_manifest_is_refused_or_read(tmp_path, name):
    """It may be read with other content, and no worse."""

    def write(path):
        ALL[name].write(path)
        (path.parent / "manifest.json").unlink()

    tally = tally_mutants(replace(ALL[name], write=write, digest=False), tmp_path, N_MUTANTS, seed=1)
    assert tally.examples == []
    assert tally.bad == 0


@pytest.mark.parametrize("mutators", [TEXT, CSV, JSON, DAMAGES], ids=["text", "csv", "json", "any file"])
def test_mutants_follow_from_the_seed(mutators):
    data = b'{"a": [1, 2.5, "x"], "b": {"c": null}}\n'
    first, again = ([*mutants(mutators, data, 30, seed)] for seed in (5, 5))
    assert first == again
    assert first != [*mutants(mutators, data, 30, 6)]
    assert all(mutant.data != data for mutant in first)
