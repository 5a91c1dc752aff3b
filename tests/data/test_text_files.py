import hashlib

import pytest

from recurra.data import _files as text_files
from recurra.data._files import TextFile, find_text_files, joined, require_splits


def read(path):
    return "".join(text for text, _ in TextFile(path).blocks())


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.txt", "validation.txt", "test.txt"),
    ],
)
def test_known_names(tmp_path, names):
    others = ["ptb.char.train.txt", "README", "train.txt.bak", "xtrain.txt", "test.csv"]
    for name in (*names, *others):
        (tmp_path / name).write_text(name)
    found = find_text_files(tmp_path)
    assert tuple(found[split].path.name for split in ("train", "valid", "test")) == names
    require_splits(tmp_path, found)


def test_two_files_for_one_split_are_refused(make_corpus):
    folder = make_corpus()
    (folder / "validation.tokens").write_text("x")
    with pytest.raises(
        ValueError, match=r"the valid split of .* is in 2 files \(valid.txt, validation.tokens\); expected one"
    ):
        find_text_files(folder)


def test_missing_folders_and_files_are_named(tmp_path, make_corpus):
    with pytest.raises(FileNotFoundError, match=r"nowhere, which does not exist; .* valid and test files$"):
        find_text_files(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no text files; expected .txt files, or files named ptb.SPLIT.txt"):
        find_text_files(tmp_path)
    folder = make_corpus(train=None, test=None)
    with pytest.raises(FileNotFoundError, match=r"no train and no test file \(only valid.txt\); .*enough if you pass"):
        require_splits(folder, find_text_files(folder))


def test_empty_files_are_refused(make_corpus):
    with pytest.raises(ValueError, match=r"test.txt is empty"):
        find_text_files(make_corpus(test=""))
    path = make_corpus(test=" \n\t\n") / "test.txt"
    with pytest.raises(ValueError, match=r"test.txt is only white space"):
        read(path)


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
def test_blocks_are_whole_lines_whatever_their_size(make_corpus, monkeypatch, block_bytes):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", block_bytes)
    text = "\ufeffä one\r\n\n\n𝄞 two\u2028three\n four \n\n"
    path = make_corpus(train=text) / "train.txt"
    blocks = list(TextFile(path).blocks())
    assert "".join(block for block, _ in blocks) == text[1:]
    assert all(block.endswith("\n") for block, _ in blocks)
    assert sum(n for _, n in blocks) == path.stat().st_size
    assert len(blocks) > 1 or block_bytes == 1000


@pytest.mark.parametrize("block_bytes", [5, 1000])
def test_invalid_utf8_is_located(make_corpus, monkeypatch, block_bytes):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", block_bytes)
    path = make_corpus(train=b"one\ntwo\nth\xffree\n") / "train.txt"
    with pytest.raises(ValueError, match=r"is not UTF-8 \(byte 10 is 0xff\); expected text in UTF-8: convert"):
        read(path)


def test_a_file_that_changes_under_way_is_noticed(make_corpus):
    file = TextFile(make_corpus(train="one two\n") / "train.txt")
    file.path.write_text("one six\n")
    with pytest.raises(OSError, match=r"train.txt is not the file that it was when reading began"):
        list(file.blocks())


@pytest.mark.parametrize("length", [1, 5, 100])
def test_texts_are_joined_until_they_are_long(length):
    texts = ["ab\n", "\n", "cd\n", "e\n"] * 3
    parts = list(joined(texts, length))
    assert "".join(parts) == "".join(texts)
    assert all(len(part) >= length for part in parts[:-1])
    assert length == 1 or len(parts) < len(texts)
    assert list(joined([], length)) == []


LINES = [f"line {number:03} ä\n" for number in range(200)]


def cut_texts(path):
    return {split: "".join(text for text, _ in file.blocks()) for split, file in find_text_files(path).items()}


def test_a_single_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 50)
    path = tmp_path / "novel"
    path.write_bytes("".join(LINES).removesuffix("\n").encode())
    texts = cut_texts(path)
    assert list(texts) == ["train", "valid", "test"]
    assert "".join(texts.values()) == "".join(LINES)
    assert [text.count("\n") for text in texts.values()] == [180, 10, 10]


def test_text_files_without_split_names_are_one_text(tmp_path):
    for name, lines in {"a.txt": LINES[:150], "b.TXT": LINES[150:192], "c.txt": [], "d.txt": LINES[192:]}.items():
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    for other in ("notes.md", ".hidden.txt"):
        (tmp_path / other).write_text("not read\n")
    texts = cut_texts(tmp_path)
    assert "".join(texts.values()) == "".join(LINES)
    assert [text.count("\n") for text in texts.values()] == [180, 10, 10]


def test_one_split_name_keeps_a_folder_from_being_cut(make_corpus):
    folder = make_corpus(train=None, test=None)
    (folder / "novel.txt").write_text("".join(LINES), encoding="utf-8")
    assert [file.path.name for file in find_text_files(folder).values()] == ["valid.txt"]


def test_the_digest_of_a_cut_is_that_of_its_bytes(tmp_path, monkeypatch):
    path = tmp_path / "novel.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    files = find_text_files(path)
    for split, text in cut_texts(path).items():
        assert files[split].sha256 == hashlib.sha256(text.encode()).hexdigest()
        monkeypatch.setattr(text_files, "BLOCK_BYTES", 7)
    path.write_text("".join(LINES).replace("199", "200"), encoding="utf-8")
    changed = find_text_files(path)
    assert [changed[split].sha256 == files[split].sha256 for split in files] == [True, True, False]


@pytest.mark.parametrize("text", ["one line " * 100, "one\ntwo\n"])
def test_a_text_with_too_few_lines_is_not_cut(tmp_path, text):
    path = tmp_path / "novel.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"novel.txt, a text of \d+ bytes with too few lines; .*: add text or"):
        find_text_files(path)


def test_an_empty_novel_and_one_that_is_not_utf8_are_refused(tmp_path):
    path = tmp_path / "novel.txt"
    path.touch()
    with pytest.raises(ValueError, match=r"novel.txt is empty; expected lines of text"):
        find_text_files(path)
    path.write_bytes("".join(LINES).encode("latin-1"))
    with pytest.raises(ValueError, match=r"novel.txt is not UTF-8 \(byte 9 is 0xe4\).*: convert it first"):
        cut_texts(path)
