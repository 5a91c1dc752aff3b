import pytest

from recurra.train.run_folder import RunFolder


def test_a_folder_with_a_run_is_not_new(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.require_new()
    with pytest.raises(FileNotFoundError, match=r"run is .*one, which has no config\.yaml; expected the folder"):
        folder.require_run()
    folder.write_config("experiment: text\n")
    folder.require_run()
    with pytest.raises(FileExistsError, match=r"recurra train --resume .*runs.one.*--run"):
        folder.require_new()


def test_locking_removes_what_killed_trainings_left_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    digits = "0123456789abcdef"
    left = [".summary.json", ".log.jsonl", "checkpoints/.step-0000000004.safetensors", "checkpoints/.best.safetensors"]
    others = [
        f".eval-test.json.{digits}.tmp",  # perhaps written just now by another command
        ".summary.json.tmp",
        f".summary.json.{digits[:-1]}.tmp",
        f"summary.json.{digits}.tmp",
        f"checkpoints/.best.safetensors.{digits}.tmp.safetensors",
    ]
    for name in [*(f"{name}.{digits}.tmp" for name in left), *others]:
        (tmp_path / name).write_text("half")
    folder.lock()
    folder.unlock()
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*others, ".lock"}
