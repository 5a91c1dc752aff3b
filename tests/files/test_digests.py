import hashlib
import json

import pytest

from recurra.files.digests import checked_stamp, file_sha256, json_sha256, stamped, text_sha256


def test_files_and_text_have_the_digest_of_their_bytes(tmp_path):
    (tmp_path / "file").write_bytes("é".encode())
    assert file_sha256(tmp_path / "file") == text_sha256("é") == hashlib.sha256("é".encode()).hexdigest()


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


def test_what_carries_no_digest_passes():
    for content in ({"a": 1}, {"a": f"blobs/{'0' * 64}"}):
        assert checked_stamp(content, "x") == content
