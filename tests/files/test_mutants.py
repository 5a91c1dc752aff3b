"""Damaged files: each is refused in one sentence that names it, or read as what was written."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from benchmarks.faults.binary_mutants import ARCHIVE_MUTATORS, DAMAGES, parse_safetensors, write_safetensors
from benchmarks.faults.kinds import FOLDER_FILES, all_kinds
from benchmarks.faults.mutants import CSV, JSON, TEXT, mutants
from benchmarks.faults.outcomes import EQUAL, REFUSED, tally_mutants

N_MUTANTS = 40
ALL = all_kinds()
REMADE = ("encoded text", "header of encoded text")
OLDER_JSON = ("tokenizer.json, words", "tokenizer.json, byte pairs", "eval-test.json", "summary of the page")
OLDER_FOLDERS = tuple(f"folder for transformers, {name}" for name in FOLDER_FILES if name != "recurra.json")


@pytest.fixture(autouse=True)
def settings(unchecked):
    """What is damaged is to reach the library's own checks, a file without a digest is noted, and a run that is resumed
    sets the number of threads."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ALL)
def test_it_is_refused_or_read_as_it_was(tmp_path, name):
    n_mutants = N_MUTANTS if name != "checkpoint, resumed from" else len(ARCHIVE_MUTATORS)  # a trainer is made for each
    tally = tally_mutants(ALL[name], tmp_path, n_mutants, seed=1)
    assert tally.examples == []
    assert tally.bad == 0
    if name in REMADE:
        assert tally.counts == {EQUAL: tally.counts.total()}
    else:
        assert tally.counts[REFUSED] > n_mutants // 4, "the mutators do their work"


def without_digest(kind, strip):
    """The kind as it was written before there were digests: it may be read with other content, and no worse."""

    def write(path):
        kind.write(path)
        strip(path)

    return replace(kind, write=write, digest=False)


def strip_json(path):
    content = json.loads(path.read_text())
    content.pop("sha256", None)
    content.get("model", {}).pop("sha256", None)
    path.write_text(json.dumps(content, indent=1))


def strip_folder(path):
    (path.parent / "recurra.json").unlink()


def strip_single_file(path):
    parts = parse_safetensors(path.read_bytes())
    older = parts.metadata["recurra"].replace("recurra model 2", "recurra model 1")
    older = older[: older.index(', "digest"')] + "}"
    path.write_bytes(write_safetensors(parts._replace(metadata={**parts.metadata, "recurra": older})))


STRIPS = {
    **dict.fromkeys(OLDER_JSON, strip_json),
    **dict.fromkeys(OLDER_FOLDERS, strip_folder),
    "single file": strip_single_file,
}


@pytest.mark.parametrize("name", STRIPS)
def test_older_files_without_a_digest_are_refused_or_read(tmp_path, name):
    tally = tally_mutants(without_digest(ALL[name], STRIPS[name]), tmp_path, N_MUTANTS // 2, seed=1)
    assert tally.examples == []
    assert tally.bad == 0


@pytest.mark.parametrize("mutators", [TEXT, CSV, JSON, DAMAGES], ids=["text", "csv", "json", "any file"])
def test_mutants_follow_from_the_seed(mutators):
    data = b'{"a": [1, 2.5, "x"], "b": {"c": null}}\n'
    first, again = ([*mutants(mutators, data, 30, seed)] for seed in (5, 5))
    assert first == again
    assert first != [*mutants(mutators, data, 30, 6)]
    assert all(mutant.data != data for mutant in first)
