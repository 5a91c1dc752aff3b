import json
import os
import warnings

import pytest

from recurra.data.cache import Cache

KEY = {"source": "digest", "type": "<u2"}


class Writer:
    """Writes the same content each time and counts how often it was asked to."""

    def __init__(self, content=b"content"):
        self.content = content
        self.calls = 0

    def __call__(self, out):
        self.calls += 1
        out.write(self.content)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def test_an_entry_is_made_once_and_kept_beside_the_data(corpus):
    write = Writer()
    paths = [Cache(corpus).get("train", KEY, write) for _ in range(2)]
    assert write.calls == 1
    assert paths[0] == paths[1]
    assert paths[0].parent == corpus / ".recurra"
    assert paths[0].read_bytes() == b"content"
    header = json.loads(paths[0].with_suffix(".json").read_text())
    assert (header["made_from"], header["bytes"]) == (KEY, 7)
    assert len(list(paths[0].parent.iterdir())) == 2, "no temporary file is left"


def test_another_key_is_another_entry(corpus):
    cache = Cache(corpus)
    one = cache.get("train", KEY, Writer(b"one"))
    two = cache.get("train", {**KEY, "type": "<u4"}, Writer(b"two"))
    assert (one.read_bytes(), two.read_bytes()) == (b"one", b"two")


def damage_header(**changes):
    def damage(path):
        header = path.with_suffix(".json")
        header.write_text(json.dumps({**json.loads(header.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"conten"),
        lambda path: path.write_bytes(b"Content"),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_bytes(b"{"),
        lambda path: path.with_suffix(".json").write_bytes(b"\xff"),
        lambda path: path.with_suffix(".json").write_bytes(b"[1]"),
        damage_header(format=0),
        damage_header(made_from={**KEY, "source": "another"}),
        damage_header(bytes=8),
        damage_header(sha256="0" * 64),
    ],
)
def test_a_bad_entry_is_made_anew(corpus, damage):
    path = Cache(corpus).get("train", KEY, Writer())
    damage(path)
    write = Writer()
    assert Cache(corpus).get("train", KEY, write).read_bytes() == b"content"
    assert write.calls == 1
    assert Cache(corpus).get("train", KEY, write) == path
    assert write.calls == 1


def test_an_entry_swapped_for_another_is_made_anew(corpus):
    cache = Cache(corpus)
    one = cache.get("train", KEY, Writer(b"one"))
    two = cache.get("train", {**KEY, "type": "<u4"}, Writer(b"two"))
    for suffix in (".bin", ".json"):
        os.replace(two.with_suffix(suffix), one.with_suffix(suffix))
    assert cache.get("train", KEY, Writer(b"one")).read_bytes() == b"one"


def test_a_writer_that_fails_leaves_no_entry(corpus):
    def fail(out):
        out.write(b"half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        Cache(corpus).get("train", KEY, fail)
    assert list((corpus / ".recurra").iterdir()) == []
    assert Cache(corpus).get("train", KEY, Writer()).read_bytes() == b"content"


def block_with_a_file(corpus):
    (corpus / ".recurra").write_text("in the way")


def mark_read_only(corpus):
    corpus.chmod(0o555)


@pytest.mark.parametrize("block", [block_with_a_file, mark_read_only])
def test_an_unwritable_folder_falls_back_to_the_users_with_one_warning(corpus, user_cache, block):
    block(corpus)
    write = Writer()
    cache = Cache(corpus)
    with pytest.warns(UserWarning, match=r"cached in .*default folder cannot be written") as caught:
        path, _ = [cache.get(name, KEY, write) for name in ("train", "test")]
    assert len(caught) == 1
    assert path.parent.parent == user_cache / "recurra"
    assert not (corpus / ".recurra").is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cache(corpus).get("train", KEY, write) == path
    assert write.calls == 2


def test_two_unwritable_corpora_do_not_share_a_folder(corpus, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    parents = []
    for folder in (corpus, other):
        block_with_a_file(folder)
        with pytest.warns(UserWarning, match="default folder"):
            parents.append(Cache(folder).get("train", KEY, Writer()).parent)
    assert parents[0] != parents[1]


def test_a_sound_entry_in_a_read_only_folder_is_used(corpus):
    path = Cache(corpus).get("train", KEY, Writer())
    path.parent.chmod(0o555)
    mark_read_only(corpus)
    write = Writer()
    assert Cache(corpus).get("train", KEY, write) == path
    assert write.calls == 0


def test_the_home_folder_is_used_where_no_cache_folder_is_set(corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    block_with_a_file(corpus)
    with pytest.warns(UserWarning, match="default folder"):
        path = Cache(corpus).get("train", KEY, Writer())
    assert path.parent.parent == tmp_path / "home" / ".cache" / "recurra"


def test_a_folder_asked_for_by_name_is_used_or_refused(corpus, tmp_path):
    named = tmp_path / "a" / "b"
    assert Cache(corpus, named).get("train", KEY, Writer()).parent == named
    assert not (corpus / ".recurra").exists()

    file = tmp_path / "file"
    file.write_text("in the way")
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    sealed.chmod(0o555)
    for folder in (file, file / "inside", sealed, sealed / "inside"):
        with pytest.raises(RuntimeError, match=rf"cache is a folder that cannot be written \({folder}: .*; expected"):
            Cache(corpus, folder).get("train", KEY, Writer())


def test_nowhere_to_write_is_an_error(corpus, tmp_path, monkeypatch):
    block_with_a_file(corpus)
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / ".recurra" / "x"))
    with pytest.raises(RuntimeError, match=r"cache is None, and no default folder can be written"):
        Cache(corpus).get("train", KEY, Writer())


def test_an_account_without_a_home_still_has_the_folder_beside_the_data(corpus, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("recurra.data.cache.Path.home", no_home)
    assert Cache(corpus).get("train", KEY, Writer()).parent == corpus / ".recurra"
