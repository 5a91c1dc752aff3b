import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from benchmarks.faults.binary_mutants import swap_members, zip_bomb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.training.payloads import payload
from torch import nn

from recurra.training import CheckpointError, CheckpointFolder, load_checkpoint, load_weights
from recurra.training.checkpoint import save_checkpoint

PAYLOAD = payload()


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


class Unpicklable(str):
    def __reduce__(self):
        raise TypeError("not this one")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("checkpoint") / "a.pt"
    save_checkpoint(path, PAYLOAD)
    return path.read_bytes()


def test_what_was_saved_is_loaded(tmp_path):
    save_checkpoint(tmp_path / "a.pt", PAYLOAD)
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert same({key: loaded[key] for key in PAYLOAD}, PAYLOAD)
    assert loaded["versions"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_failed_write_leaves_the_old_file(tmp_path, written):
    path = tmp_path / "a.pt"
    path.write_bytes(written)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save_checkpoint(path, payload(converted_from=Unpicklable("a run")))
    assert path.read_bytes() == written
    assert [other.name for other in tmp_path.iterdir()] == ["a.pt"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(tmp_path, written, share):
    path = tmp_path / "a.pt"
    path.write_bytes(written[: int(share * len(written))])
    with pytest.raises(CheckpointError, match=r"a\.pt is truncated, damaged or not a checkpoint"):
        load_checkpoint(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_harmless(tmp_path, written, data):
    place = data.draw(st.integers(0, len(written) - 1))
    damaged = bytearray(written)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "a.pt"
    path.write_bytes(damaged)
    try:
        loaded = load_checkpoint(path)
    except CheckpointError:
        return
    assert same({key: loaded[key] for key in PAYLOAD}, PAYLOAD)


def test_damage_in_the_weights_is_always_refused(tmp_path, written):
    weights = PAYLOAD["model"]["weight"].numpy().tobytes()
    start = written.index(weights)
    path = tmp_path / "a.pt"
    for offset in range(0, len(weights), 97):
        damaged = bytearray(written)
        damaged[start + offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="wrong checksum"):
            load_checkpoint(path)


class Foreign:
    pass


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: path.write_text("hello"), "damaged or not a checkpoint"),
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), "damaged or not a checkpoint"),
        (lambda path: torch.save(Foreign(), path), "damaged or not a checkpoint"),
        (
            lambda path: torch.save({"model": {}}, path),
            "is another kind of file; expected a checkpoint",
        ),
        (lambda path: torch.save([1], path), "is another kind of file; expected a checkpoint"),
        (
            lambda path: torch.save(
                {"format": "recurra-checkpoint", "format_version": 99, "versions": {"recurra": "9.0"}}, path
            ),
            r"in checkpoint format 99 of recurra 9\.0; expected format 2: open it with recurra 9\.0",
        ),
        (
            lambda path: torch.save({"format": "recurra-checkpoint"}, path),
            "in checkpoint format None of another recurra; expected format 2",
        ),
        (lambda path: None, "which does not exist"),
    ],
)
def test_foreign_files_are_refused_by_name(tmp_path, write, reason):
    path = tmp_path / "other.pt"
    write(path)
    with pytest.raises(CheckpointError, match=reason) as raised:
        load_checkpoint(path)
    assert str(path) in str(raised.value)


class Intruder:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "was here")


def test_loading_runs_no_code(tmp_path):
    path, trace = tmp_path / "a.pt", tmp_path / "trace"
    torch.save({"format": "recurra-checkpoint", "format_version": 1, "model": Intruder(trace)}, path)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(path)
    assert not trace.exists()


def test_another_architecture_is_refused_with_the_names_that_differ():
    saved = {"model": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()}
    model = nn.Sequential(nn.Linear(3, 5))
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointError) as raised:
        load_weights(model, saved["model"], Path("a.pt"))
    assert "a.pt is a checkpoint of another model" in str(raised.value)
    assert "0.bias (4,), here (5,)" in str(raised.value)
    assert "1.bias (2,), here missing and 1 more" in str(raised.value)
    assert torch.equal(model[0].weight, before)


def test_the_newest_are_kept_and_the_best_stays(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    folder.save(1, PAYLOAD)
    folder.save_best(PAYLOAD)
    for step in (2, 9, 10):
        folder.save(step, PAYLOAD)
    assert [path.name for path in folder.steps()] == ["step-0000000009.pt", "step-0000000010.pt"]
    assert folder.find("last").name == "step-0000000010.pt"
    assert folder.find("previous").name == "step-0000000009.pt"
    assert folder.find("best").name == "best.pt"
    assert folder.find(str(folder.path / "step-0000000009.pt")).name == "step-0000000009.pt"
    folder.drop_after(9)
    assert [path.name for path in folder.steps()] == ["step-0000000009.pt"]
    assert folder.best.is_file()


def test_copies_under_other_names_are_left_alone(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    for step in (4, 10_000_000_000):
        folder.save(step, PAYLOAD)
        folder.save_best(PAYLOAD)
    copies = "best copy.pt", "best-of-first.pt", "step-0000000004-good.pt", "step-0000000004.pt.bak", "step-99999999999"
    for name in copies[:-1]:
        (folder.path / name).write_bytes(b"")
    (folder.path / copies[-1]).mkdir()  # what several ranks write
    assert [path.name for path in folder.steps()] == ["step-10000000000.pt", "step-99999999999"]
    assert folder.best.name == "best.pt"
    folder.drop_after(3)
    folder.save(5, PAYLOAD)
    folder.save_best(PAYLOAD)
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        [*copies[:-1], "best.pt", "step-0000000005.pt"]
    )


@pytest.mark.parametrize(
    "value",
    [{1}, torch.float32, Path("a"), {(1, 2): 3}, [{"inside": object()}]],
    ids=["a set", "a type", "a path", "a tuple as a key", "an object inside"],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, value):
    with pytest.raises(
        ValueError, match=r"of own of optimizer in .*a\.pt is .*; expected (plain data|a string or a wh)"
    ):
        save_checkpoint(tmp_path / "a.pt", payload(optimizer={**PAYLOAD["optimizer"], "own": {"new": value}}))
    assert not any(tmp_path.iterdir())


def test_an_optimiser_may_number_what_it_keeps(tmp_path):
    own = {"slow": {0: torch.ones(2), 1: {2: None}}}
    save_checkpoint(tmp_path / "a.pt", payload(optimizer={**PAYLOAD["optimizer"], **own}))
    assert same(load_checkpoint(tmp_path / "a.pt")["optimizer"]["slow"], own["slow"])


@pytest.mark.parametrize("which", ["last", "previous", "best", "nowhere.pt"])
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
        ({"position": {"step": "7"}}, r"step of position in .*a\.pt is a str; expected a count, 0 or more"),
        ({"position": {"step": -7}}, r"step of position in .*a\.pt is -7; expected a count, 0 or more"),
        ({"position": {"step": 7}}, r"position in .*a\.pt is a dict with step; expected a dict with epoch"),
        ({"model": [1]}, r"model in .*a\.pt is a list; expected a dict"),
        ({"model": {"weight": 3}}, r"weight of model in .*a\.pt is 3; expected a tensor"),
        ({"model": {3: torch.ones(2)}}, r"a key of model in .*a\.pt is 3; expected a string"),
        ({"model": {"w": torch.tensor([1.0, torch.nan])}}, r"w in .*a\.pt is a tensor with numbers that are not fin"),
        ({"model": {"w": torch.tensor([torch.inf * 1j])}}, r"w in .*a\.pt is a tensor with numbers that are not fini"),
        (
            {"average": {"weights": {"w": torch.full((2,), torch.inf)}, "n_averaged": 2}},
            r"w in .*a\.pt is a tensor with numbers that are not finite; expected finite numbers",
        ),
        ({"average": {"n_averaged": 2}}, r"average in .*a\.pt is a dict with n_averaged; expected a dict with weights"),
        ({"optimizer": {"state": {}}}, r"optimizer in .*a\.pt is a dict with state; expected a dict with state, param"),
        ({"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, r"\[0\] of param_groups of optimizer in "),
        ({"levels": {"level": 1}}, r"levels in .*a\.pt is a dict with level; expected a dict with epoch"),
        ({"window": {"loss": 1.0}}, r"window in .*a\.pt is a dict with loss; expected a dict with n_targets"),
        (
            {"scores": {"last": {"step": 7, "loss": float("nan")}}},
            r"loss of last of scores in .*a\.pt is nan; exp",
        ),
        ({"random": {"python": []}}, r"random in .*a\.pt is a dict with python; expected a dict with numpy"),
        ({"resumed_at": [True]}, r"\[0\] of resumed_at in .*a\.pt is True; expected a count"),
        ({"betas": (0.9, 0.98)}, r"a\.pt is a checkpoint with 'betas'; expected one with format"),
    ],
)
def test_a_payload_that_is_not_what_it_should_be_is_refused(tmp_path, change, message):
    save_checkpoint(tmp_path / "a.pt", payload(**change))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("section", [name for name in PAYLOAD if name not in ("levels", "resumed_at")])
def test_a_missing_section_is_refused(tmp_path, section):
    save_checkpoint(tmp_path / "a.pt", {name: value for name, value in PAYLOAD.items() if name != section})
    with pytest.raises(CheckpointError, match=rf"a\.pt is without {section}; expected a checkpoint with"):
        load_checkpoint(tmp_path / "a.pt")


def test_weights_that_have_changed_places_are_refused(tmp_path, written):
    save_checkpoint(tmp_path / "a.pt", payload(model={"one": torch.ones(64), "other": torch.zeros(64)}))
    (tmp_path / "a.pt").write_bytes(swap_members((tmp_path / "a.pt").read_bytes()))
    with pytest.raises(CheckpointError, match="its members do not match its digest"):
        load_checkpoint(tmp_path / "a.pt")


def test_a_bomb_is_refused_unread(tmp_path, written, monkeypatch):
    (tmp_path / "a.pt").write_bytes(zip_bomb(2 * 10**7, written))
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *arguments: pytest.fail("a member was read"))
    with pytest.raises(CheckpointError, match=r"a\.pt is truncated, damaged or not a checkpoint \(its member .* is c"):
        load_checkpoint(tmp_path / "a.pt")


def test_checkpoints_from_before_the_digest_open(tmp_path):
    stamped = {"format": "recurra-checkpoint", "format_version": 2, "versions": {"recurra": "0.1.0"}, **PAYLOAD}
    del stamped["resumed_at"]
    torch.save(stamped, tmp_path / "a.pt")
    assert same(load_checkpoint(tmp_path / "a.pt"), stamped)
