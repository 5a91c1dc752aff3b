"""Disks that fill up or fail: one sentence, nothing half written, and the same as undisturbed at the next try."""

import gc
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from benchmarks.faults.disk import FaultyDisk, Killed, SmallDisk
from benchmarks.faults.weights import small_mamba, small_model
from benchmarks.faults.writers import tally_disk_faults, writers

from recurra._files.writing import put_in_place, replace_files
from recurra.cli import main
from recurra.convert.portable import save_single_file
from recurra.data._prepare import Preparation, prepare
from recurra.data.corpus import ShardCorpus
from recurra.video.motions import write_motions

PAGE = 4096


WRITERS = ("text cache", "stream", "single file", "web export")


@pytest.fixture
def disk(tmp_path):
    """A disk in memory of 1 MB, and its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        with SmallDisk(folder, 2**20) as mounted:
            yield mounted, folder
    except PermissionError as error:
        pytest.skip(f"needs root: {error}")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", ".filler")}


def test_a_shard_is_not_cut_short_by_a_full_disk(disk, tmp_path):
    """NumPy's own way of writing an array says nothing of the bytes that are left in its buffer."""
    mounted, folder = disk
    (tmp_path / "train.txt").write_text("a b c\n" * 1003)
    undisturbed = prepare(Preparation("folder", str(tmp_path), tmp_path / "out"))
    asked = Preparation("folder", str(tmp_path), folder / "out")
    for n_pages in range(7):
        with mounted.leaving(n_pages * PAGE), pytest.raises(OSError, match=rf"No space left on device: '{folder}/out"):
            prepare(asked)
        assert not list(folder.glob("out/*.tmp"))
        shutil.rmtree(folder / "out")
    assert prepare(asked) == undisturbed
    assert np.array_equal(*(ShardCorpus(out).tokens("train")[:] for out in (folder / "out", tmp_path / "out")))


def test_a_shard_that_cannot_be_read_back_is_an_error_of_the_disk(tmp_path):
    (tmp_path / "train.txt").write_text("a b c\n")
    asked = Preparation("folder", str(tmp_path), tmp_path / "out")
    prepare(asked)  # the process now has the tokenizer, and reads it no more
    shutil.rmtree(tmp_path / "out")
    with FaultyDisk(tmp_path / "out") as counted:
        prepare(asked)
    said = []
    for number in (number for number, call in enumerate(counted.calls) if call == "read"):
        shutil.rmtree(tmp_path / "out")
        try:
            with FaultyDisk(tmp_path / "out", number):
                prepare(asked)
        except OSError as error:
            said.append(str(error))
    assert all(str(tmp_path / "out") in one for one in said)
    assert any("whose shards cannot be read back; expected" in one for one in said)


def test_generated_videos_name_the_full_disk(tmp_path):
    pytest.importorskip("av")
    with FaultyDisk(tmp_path) as counted:
        write_motions(tmp_path / "whole", 1, n_motions=1, frames_per_motion=1, image_size=16)
    for number in (number for number, call in enumerate(counted.calls) if call == "write"):
        with (
            FaultyDisk(tmp_path, number, "full"),
            pytest.raises(OSError, match=f"No space left on device: '{tmp_path}"),
        ):
            write_motions(tmp_path / "videos", 1, n_motions=1, frames_per_motion=1, image_size=16)


@pytest.mark.parametrize("to", ["hf", "gguf", "published"])
def test_an_export_to_a_full_disk_is_one_sentence(disk, tmp_path, capsys, to):
    mounted, folder = disk
    source, target = tmp_path / "model.safetensors", folder / "target"
    save_single_file(small_model() if to == "hf" else small_mamba(), source)
    words = ["convert", str(source), str(target), "--to", to]
    for n_pages in (0, 1, 2, 3, 4):
        with mounted.leaving(n_pages * PAGE):
            assert main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(target) in said
        assert "No space left" in said
        assert content(folder) == {}
    assert main(words) == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "text cache")) for name in WRITERS]
)
def test_any_call_may_fail(tmp_path, name):
    gc.freeze()  # garbage is collected after every kill, among what the test has made alone
    counts, wrong = tally_disk_faults(writers()[name](tmp_path / "work"), tmp_path)
    assert wrong == []
    assert sum(counts.values()) > 20


OLD, NEW = {"a": b"old", "config.json": b"old"}, {"a": b"new", "config.json": b"new"}


def write_files(folder: Path) -> None:
    replace_files({folder / name: data for name, data in NEW.items()})


def write_folder(folder: Path) -> None:
    with put_in_place(folder) as scratch:
        scratch.mkdir()
        for name, data in NEW.items():
            (scratch / name).write_bytes(data)


@pytest.mark.parametrize("write", [write_files, write_folder])
@pytest.mark.parametrize("fault", ["full", "once", "killed"])
def test_files_of_two_versions_are_never_taken_for_one(tmp_path, write, fault):
    folder = tmp_path / "folder"
    write_files(folder)
    with FaultyDisk(tmp_path) as counted:
        write(folder)
    for number in range(len(counted.calls)):
        replace_files({folder / name: data for name, data in OLD.items()})
        with FaultyDisk(tmp_path, number, fault), suppress(OSError, Killed):
            write(folder)
        if fault != "killed" and counted.calls[number] != "read":  # without which no folder can be removed
            assert not [*folder.glob(".*"), *tmp_path.glob(".*")]
        found = {name: (folder / name).read_bytes() for name in OLD if (folder / name).is_file()}
        assert found in (OLD, NEW, {"a": b"old"}, {"a": b"new"}), "without its config a folder is refused"
        if counted.calls[number] in ("open", "write"):
            assert found == OLD
