import json

import pytest

from recurra._files.digests import (
    checked_stamp,
    json_sha256,
    read_manifest,
    require_files,
    stamped,
    text_sha256,
    write_manifest,
)


def test_layout_and_order_do_not_count_but_values_do():
    content = {"b": [1, 2.5, None], "a": {"é": "\ud800"}}
    again = json.loads(json.dumps({"a": {"é": "\ud800"}, "b": [1, 2.5, None]}, indent=3))
    assert json_sha256(content) == json_sha256(again)
    for other in ({**content, "b": [1, 2.5]}, {**content, "b": [1.0, 2.5, None]}, {**content, "c": 1}):
        assert json_sha256(other) != json_sha256(content)


def test_a_stamp_survives_json_and_finds_every_change():
    content = {"a": 1, "b": {10: (1, 2), 9: 0.1}}
    written = json.loads(json.dumps(stamped(content), indent=1))
    assert checked_stamp(written, "x") == json.loads(json.dumps(content))
    assert stamped(stamped(content)) == stamped(content)
    misnamed = {{"sha256": "sha25"}.get(key, key): value for key, value in written.items()}
    inside = {"a": 1, "b": {"sha256": written["sha256"], "10": [1, 2]}}
    for displaced in (misnamed, inside):
        with pytest.raises(ValueError, match=r"^x is damaged"):
            checked_stamp(displaced, "x")
    for change in ({"a": 2}, {"c": 0}, {"sha256": None}, {"sha256": "0" * 64}):
        with pytest.raises(ValueError, match=r"^x is damaged: .*; expected what was written: again$"):
            checked_stamp(written | change, "x", "again")


@pytest.fixture
def folder(tmp_path):
    for name in ("a.txt", "b.bin", "notes"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, {"step": 3}, ("*.txt", "*.bin"))
    return tmp_path


def test_a_manifest_has_the_digests_of_the_files_that_fit(folder):
    found = read_manifest(folder)
    assert found["step"] == 3
    assert found["files"] == {name: text_sha256(name) for name in ("a.txt", "b.bin")}
    require_files(folder, found["files"])


def test_a_manifest_written_again_keeps_the_digests_of_other_files_that_are_there(folder):
    (folder / "a.txt").write_text("changed")
    (folder / "c.bin").write_text("new")
    before = read_manifest(folder)["files"]
    (folder / "b.bin").unlink()
    write_manifest(folder, {}, ("c.*",))
    assert read_manifest(folder) == {"files": {"a.txt": before["a.txt"], "c.bin": text_sha256("new")}}


def test_a_file_that_changed_or_is_missing_is_refused_by_name(folder):
    files = read_manifest(folder)["files"]
    (folder / "a.txt").write_text("b.txt")
    with pytest.raises(ValueError, match=r"a\.txt is damaged: its content does not match its digest in manifest\.json"):
        require_files(folder, files)
    require_files(folder, files, ("*.bin",))
    (folder / "b.bin").unlink()
    with pytest.raises(ValueError, match=r"b\.bin is missing, although manifest\.json lists it"):
        require_files(folder, files, ("*.bin",))
    with pytest.raises(ValueError, match=r"passwd is missing"):
        require_files(folder, {"../etc/passwd": ""})


def test_a_damaged_manifest_is_refused(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        read_manifest(folder)
    path.write_text(json.dumps(stamped({"step": 3})))
    with pytest.raises(ValueError, match=r"manifest\.json is without files"):
        read_manifest(folder)
    path.unlink()
    assert read_manifest(folder) == {}
