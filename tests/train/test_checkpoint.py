import json
import os
from pathlib import Path

import pytest
import torch
from benchmarks.faults.binary_mutants import swap_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.train.payloads import payload
from torch import nn

from recurra._files.digests import content_digest
from recurra._files.weights import write_safetensors
from recurra.train import checkpoint
from recurra.train._distributed_checkpoint import RankCheckpoints
from recurra.train._ranks import Ranks
from recurra.train.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    _save_checkpoint,
    join_tensors,
    load_checkpoint,
    load_weights,
    scored_weights,
    split_tensors,
)

PAYLOAD = payload()


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("checkpoint") / "a.safetensors"
    _save_checkpoint(path, PAYLOAD)
    return path.read_bytes()


def test_what_was_saved_is_loaded(tmp_path):
    _save_checkpoint(tmp_path / "a.safetensors", PAYLOAD)
    loaded = load_checkpoint(tmp_path / "a.safetensors")
    assert same({key: loaded[key] for key in PAYLOAD}, PAYLOAD)
    assert loaded["versions"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("has_average", [False, True])
def test_only_the_weights_that_are_scored_are_copied_into_memory(tmp_path, monkeypatch, has_average):
    weights = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    average = {"weights": {name: weight + 1 for name, weight in weights.items()}} if has_average else None
    parts = {"model": weights, "average": average, "optimizer": {"a": torch.randn(3), "b": torch.randn(4)}}
    _save_checkpoint(tmp_path / "a.safetensors", PAYLOAD | parts)
    copied, copy = [], checkpoint._copy
    monkeypatch.setattr(checkpoint, "_copy", lambda *given: copied.append(copy(*given)) or copied[-1])
    loaded = load_checkpoint(tmp_path / "a.safetensors", scored_only=True)
    assert same({key: loaded[key] for key in parts}, parts)
    scored = [*map(id, scored_weights(loaded).values())]
    assert sorted(map(id, copied)) == sorted(scored)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_harmless(tmp_path, written, data):
    place = data.draw(st.integers(0, len(written) - 1))
    damaged = bytearray(written)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "a.safetensors"
    path.write_bytes(damaged)
    try:
        loaded = load_checkpoint(path)
    except CheckpointError:
        return
    assert same({key: loaded[key] for key in PAYLOAD}, PAYLOAD)


def write_content(path, content):
    """A file with the digest of its content, whatever that is."""
    described = {"content": content, "complex": [], "strides": {}}
    metadata = {"recurra": json.dumps({**described, "sha256": content_digest(described, {})})}
    with path.open("wb") as file:
        write_safetensors(file, {}, metadata)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: path.write_text("hello"), "damaged or no safetensors file"),
        (lambda path: save_file({"model": torch.ones(2)}, path), "is another kind of file; expected a checkpoint"),
        (lambda path: save_file({}, path, {"recurra": "{}"}), "its content does not match its digest"),
        (lambda path: write_content(path, {"format": "recurra model 2"}), "format of .* is 'recurra model 2'"),
        (lambda path: write_content(path, {"<items>": 3}), "is without a part of a checkpoint"),
        (lambda path: write_content(path, {"model": {"<tensor>": "w"}}), r"without a part of a checkpoint \('w'\)"),
        (lambda path: None, "which does not exist"),
    ],
)
def test_foreign_files_are_refused_by_name(tmp_path, write, reason):
    path = tmp_path / "other.safetensors"
    write(path)
    with pytest.raises(CheckpointError, match=reason) as raised:
        load_checkpoint(path)
    assert str(path) in str(raised.value)


def test_another_architecture_is_refused_with_the_names_that_differ():
    saved = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    with pytest.raises(CheckpointError, match=r"a\.safetensors is a checkpoint .*0\.bias \(4,\), here \(5,\)"):
        load_weights(nn.Sequential(nn.Linear(3, 5)), saved, Path("a.safetensors"))


def test_the_newest_are_kept_and_the_best_stays(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    folder.save(1, PAYLOAD)
    folder.save_best(PAYLOAD)
    for step in (2, 9, 10):
        folder.save(step, PAYLOAD)
    assert [path.name for path in folder.steps()] == ["step-0000000009.safetensors", "step-0000000010.safetensors"]
    assert folder.find("last").name == "step-0000000010.safetensors"
    assert folder.find("previous").name == "step-0000000009.safetensors"
    assert folder.find("best").name == "best.safetensors"
    assert folder.find(str(folder.path / "step-0000000009.safetensors")).name == "step-0000000009.safetensors"
    folder.save(3, PAYLOAD)  # by a run that went back
    assert [path.stem[-2:] for path in folder.steps()] == ["03", "09", "10"]
    folder.drop_after(9)
    folder.steps()[0].unlink()
    assert [path.name for path in folder.steps()] == ["step-0000000009.safetensors"]
    assert folder.best.is_file()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_alone_drops_later_checkpoints(tmp_path, is_first):
    ranks = Ranks()
    ranks.is_first = is_first
    later = [tmp_path / f"step-{step:010d}" for step in (2, 3)]
    for path in (tmp_path / "step-0000000001", *later):
        path.mkdir()
    folder = RankCheckpoints(tmp_path, keep=3, ranks=ranks, asynchronous=False)
    folder.drop_after(1)
    assert [path.exists() for path in later] == [not is_first] * 2
    assert (tmp_path / "step-0000000001").exists()


def test_a_run_without_a_validation_is_offered_its_last_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, PAYLOAD)
    with pytest.raises(CheckpointError, match=r"the last one, .*step-0000000001\.safetensors \(--checkpoint last\)$"):
        folder.find("best")
    folder.drop_after(0)
    with pytest.raises(CheckpointError, match=r"or the path of a file$"):
        folder.find("best")


def test_of_two_best_ones_that_of_the_later_step_counts(tmp_path):
    """A process that is killed while it replaces the best one leaves both, and the clock may have been set back."""
    folder = CheckpointFolder(tmp_path)
    folder.save_best(PAYLOAD)
    step = PAYLOAD["position"]["step"]
    for place, name in enumerate((f"best-{step - 1:010d}", f"best-{step + 1:010d}")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (10 - place, 10 - place))
    assert folder.best.name == f"best-{step + 1:010d}"
    (tmp_path / folder.best.name).rmdir()
    os.utime(folder.best, (5, 5))
    assert folder.best.name == "best.safetensors"


def test_one_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    """As `recurra eval` does beside a training."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, PAYLOAD)

    def late(path, *arguments, **options):
        if path.name.endswith("1.safetensors"):
            folder.save(2, PAYLOAD)
        return load_checkpoint(path, *arguments, **options)

    monkeypatch.setattr("recurra.train.checkpoint.load_checkpoint", late)
    path, loaded = folder.load("last")
    assert path.name == "step-0000000002.safetensors"
    assert same(loaded["model"], PAYLOAD["model"])


@pytest.mark.parametrize(
    "value",
    [{(1, 2): 3}, [{"inside": object()}]],
    ids=["a tuple as a key", "an object inside"],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, value):
    with pytest.raises(
        ValueError, match=r"optimizer\.own\.new.* in .*a\.safetensors is .*; expected (plain data|a string or a wh)"
    ):
        _save_checkpoint(tmp_path / "a.safetensors", payload(optimizer={**PAYLOAD["optimizer"], "own": {"new": value}}))
    assert not any(tmp_path.iterdir())


def test_a_damaged_last_one_is_refused_and_the_one_before_is_offered(tmp_path, written):
    folder = CheckpointFolder(tmp_path)
    previous, last = folder.save(1, PAYLOAD), folder.save(2, PAYLOAD)
    last.write_bytes(written[:500])
    with pytest.raises(CheckpointError) as raised:
        folder.load("last")
    assert str(last) in str(raised.value)
    assert str(previous) in str(raised.value)
    assert "--checkpoint previous" in str(raised.value)
    path, loaded = folder.load("previous")
    assert path == previous
    assert same(loaded["model"], PAYLOAD["model"])


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"w": torch.tensor([1.0, torch.nan])}},
        {"model": {"w": torch.tensor([torch.inf * 1j])}},
        {"average": {"weights": {"w": torch.full((2,), torch.inf)}, "n_averaged": 2}},
    ],
)
def test_weights_that_are_not_finite_are_refused(tmp_path, change):
    _save_checkpoint(tmp_path / "a.safetensors", payload(**change))
    with pytest.raises(CheckpointError, match=r"w in .*a\.safetensors is a tensor with numbers that are not finite"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_weights_that_have_changed_places_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    _save_checkpoint(path, payload(model={"one": torch.ones(64), "other": torch.zeros(64)}))
    path.write_bytes(swap_tensors(path.read_bytes()))
    with pytest.raises(CheckpointError, match="its content does not match its digest"):
        load_checkpoint(path)


def test_tensors_keep_their_strides(tmp_path):
    turned = torch.arange(6.0).reshape(2, 3).T
    _save_checkpoint(tmp_path / "a.safetensors", payload(state=[turned, turned.to(torch.complex64)[1:]]))
    for found, expected in zip(load_checkpoint(tmp_path / "a.safetensors")["state"], (turned, turned[1:])):
        assert torch.equal(found, expected.to(found.dtype))
        assert found.stride() == (1, 3 if len(found) == 3 else 2)


def test_tied_tensors_are_stored_once_and_keys_may_have_dots(tmp_path):
    weight = torch.arange(6000.0)
    path = tmp_path / "a.safetensors"
    _save_checkpoint(path, payload(model={"a": weight, "b": weight}, state={"a.b": weight[1:], "a": {"b": weight[2:]}}))
    loaded = load_checkpoint(path)
    assert loaded["model"]["a"] is loaded["model"]["b"]
    assert torch.equal(loaded["state"]["a.b"], weight[1:])
    assert torch.equal(loaded["state"]["a"]["b"], weight[2:])
    assert path.stat().st_size < 3 * weight.nbytes + 60_000


def test_tied_tensors_are_one_even_where_a_rank_has_no_rows_of_them():
    """FSDP gives a rank without rows of a parameter an empty view of memory that is padded."""
    memory, other = torch.zeros(4, 3), torch.zeros(4, 3)
    payload = {"model": {"first": memory[:0], "second": memory[:0], "third": other[:0]}, "list": [memory[1:], 5]}
    plain, tensors = split_tensors(payload, Path("a"))
    assert list(tensors) == ["model.first", "model.third", "list.0"]
    back = join_tensors(plain, tensors)
    assert back["model"]["second"] is back["model"]["first"] is tensors["model.first"]
    assert back["list"][1] == 5
    _, tensors = split_tensors({"model": {"first": torch.empty(0), "second": torch.empty(0)}}, Path("a"))
    assert list(tensors) == ["model.first", "model.second"]
