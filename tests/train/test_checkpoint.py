import json
import pickle
from pathlib import Path

import pytest
import torch
from benchmarks.faults.binary_mutants import swap_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.train.payloads import payload
from torch import nn

from recurra.files.digests import content_digest
from recurra.files.weights import write_safetensors
from recurra.train.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    _save_checkpoint,
    is_checkpoint_file,
    join_tensors,
    load_checkpoint,
    load_weights,
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


def test_a_failed_write_leaves_the_old_file(tmp_path, written):
    path = tmp_path / "a.safetensors"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=r"model\.c is of type torch\.uint16; expected float64, float32"):
        _save_checkpoint(path, payload(model={"c": torch.ones(3, dtype=torch.uint16)}))
    assert path.read_bytes() == written
    assert [other.name for other in tmp_path.iterdir()] == ["a.safetensors"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(tmp_path, written, share):
    path = tmp_path / "a.safetensors"
    path.write_bytes(written[: int(share * len(written))])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged or no safetensors file"):
        load_checkpoint(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
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


def test_damage_in_the_weights_is_always_refused(tmp_path, written):
    weights = PAYLOAD["model"]["weight"].numpy().tobytes()
    start = written.index(weights)
    path = tmp_path / "a.safetensors"
    for offset in range(0, len(weights), 97):
        damaged = bytearray(written)
        damaged[start + offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="its content does not match its digest"):
            load_checkpoint(path)


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
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), "damaged or no safetensors file"),
        (lambda path: save_file({"model": torch.ones(2)}, path), "is another kind of file; expected a checkpoint"),
        (lambda path: save_file({}, path, {"recurra": "{}"}), "its content does not match its digest"),
        (lambda path: save_file({}, path, {"recurra": "["}), "not readable as JSON"),
        (
            lambda path: write_content(path, {"format": "recurra model 2"}),
            "format of .* is 'recurra model 2'",
        ),
        (lambda path: write_content(path, [1]), "is without a part of a checkpoint"),
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
    saved = {"model": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()}
    model = nn.Sequential(nn.Linear(3, 5))
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointError) as raised:
        load_weights(model, saved["model"], Path("a.safetensors"))
    assert "a.safetensors is a checkpoint of another model" in str(raised.value)
    assert "0.bias (4,), here (5,)" in str(raised.value)
    assert "1.bias (2,), here missing and 1 more" in str(raised.value)
    assert torch.equal(model[0].weight, before)


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
    folder.drop_after(9)
    assert [path.name for path in folder.steps()] == ["step-0000000009.safetensors"]
    assert folder.best.is_file()


def test_copies_under_other_names_are_left_alone(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    for step in (4, 10_000_000_000):
        folder.save(step, PAYLOAD)
        folder.save_best(PAYLOAD)
    copies = (
        "best copy.safetensors",
        "best-of-first.safetensors",
        "step-0000000004-good.safetensors",
        "step-0000000004.safetensors.bak",
        "step-99999999999",
    )
    for name in copies[:-1]:
        (folder.path / name).write_bytes(b"")
    (folder.path / copies[-1]).mkdir()  # what several ranks write
    assert [path.name for path in folder.steps()] == ["step-10000000000.safetensors", "step-99999999999"]
    assert folder.best.name == "best.safetensors"
    folder.drop_after(3)
    folder.save(5, PAYLOAD)
    folder.save_best(PAYLOAD)
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        [*copies[:-1], "best.safetensors", "step-0000000005.safetensors"]
    )


@pytest.mark.parametrize(
    "value",
    [{1}, torch.float32, Path("a"), {(1, 2): 3}, [{"inside": object()}]],
    ids=["a set", "a type", "a path", "a tuple as a key", "an object inside"],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, value):
    with pytest.raises(
        ValueError, match=r"optimizer\.own\.new.* in .*a\.safetensors is .*; expected (plain data|a string or a wh)"
    ):
        _save_checkpoint(tmp_path / "a.safetensors", payload(optimizer={**PAYLOAD["optimizer"], "own": {"new": value}}))
    assert not any(tmp_path.iterdir())


def test_an_optimiser_may_number_what_it_keeps(tmp_path):
    own = {"slow": {0: torch.ones(2), 1: {2: None}}}
    _save_checkpoint(tmp_path / "a.safetensors", payload(optimizer={**PAYLOAD["optimizer"], **own}))
    assert same(load_checkpoint(tmp_path / "a.safetensors")["optimizer"]["slow"], own["slow"])


@pytest.mark.parametrize("which", ["last", "previous", "best", "nowhere.safetensors"])
def test_what_is_not_there_is_not_found(tmp_path, which):
    with pytest.raises(CheckpointError, match=which):
        CheckpointFolder(tmp_path).load(which)


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


# --- files that are well-formed, and not what a checkpoint is ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": {"step": "7"}}, r"position\.step is a str; expected a number"),
        ({"model": [1]}, "model is a list; expected an object"),
        ({"model": {"weight": 3}}, r"model\.weight is an int; expected a Tensor"),
        ({"model": {3: torch.ones(2)}}, "a key of model is an int; expected a string"),
        ({"model": {"w": torch.tensor([1.0, torch.nan])}}, r"w in .*a\.safetensors is a tensor with numbers that are"),
        ({"model": {"w": torch.tensor([torch.inf * 1j])}}, r"w in .*a\.safetensors is a tensor with numbers that are"),
        (
            {"average": {"weights": {"w": torch.full((2,), torch.inf)}, "n_averaged": 2}},
            r"w in .*a\.safetensors is a tensor with numbers that are not finite; expected finite numbers",
        ),
        ({"average": {"n_averaged": 2}}, r"a\.safetensors is without a part of a checkpoint \('weights'\)"),
        ({"optimizer": {"state": {"a": {}}}}, "a key of state is a str; expected a whole number"),
        ({"optimizer": {"param_groups": [3]}}, r"param_groups\[0\] is an int; expected an object"),
        ({"random": [3]}, r"random\[0\] is an int; expected an object"),
        ({"resumed_at": [True]}, r"resumed_at\[0\] is a bool; expected a whole number"),
        ({"betas": (0.9, 0.98)}, r"a\.safetensors is one with betas; expected one with format, versions"),
    ],
)
def test_a_payload_that_is_not_what_it_should_be_is_refused(tmp_path, change, message):
    _save_checkpoint(tmp_path / "a.safetensors", payload(**change))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_checkpoint(tmp_path / "a.safetensors")
    assert str(tmp_path / "a.safetensors") in str(raised.value)


@pytest.mark.parametrize("section", [name for name in PAYLOAD if name not in ("levels", "resumed_at")])
def test_a_missing_section_is_refused(tmp_path, section):
    _save_checkpoint(tmp_path / "a.safetensors", {name: value for name, value in PAYLOAD.items() if name != section})
    with pytest.raises(CheckpointError, match=f"is without {section}; expected one with format"):
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


def test_other_weights_are_no_checkpoint(tmp_path, written):
    (tmp_path / "a.safetensors").write_bytes(written)
    save_file({"a": torch.ones(2)}, tmp_path / "b.safetensors", {"recurra": "{}"})
    (tmp_path / "c.safetensors").write_text("hello")
    (tmp_path / "a.bin").write_bytes(written)
    assert [path.name for path in sorted(tmp_path.iterdir()) if is_checkpoint_file(path)] == ["a.safetensors"]
