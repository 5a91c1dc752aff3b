from pathlib import Path

import pytest

from recurra.video.layouts import (
    _CROSS_SUBJECT_CLASSES,
    _CROSS_VIEW_CLASSES,
    SMARTHOME_PROTOCOLS,
    VIDEO_LAYOUTS,
    parse_smarthome_name,
)


@pytest.fixture
def folder(tmp_path):
    def make(*names, **lists):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        for name, text in lists.items():
            (tmp_path / f"{name}.csv").write_text(text)
        return tmp_path

    return make


def named(listing, split, root):
    return [(str(video.path.relative_to(root)), video.label) for video in listing.videos[split]]


@pytest.mark.parametrize(
    "text",
    [
        "a.mp4,walk\nsub/b c.mp4,run\n",
        "path,label\na.mp4,walk\n\nsub/b c.mp4,run\n",
        "video_name, label\na.mp4, walk\nsub/b c.mp4, run",
        'a.mp4,poses/a.json,walk\r\n"sub/b c.mp4",poses/b.json,run\r\n',
        "\ufeffa.mp4,walk\nsub/b c.mp4,run\n",
    ],
)
def test_lists_by_commas(text, folder):
    root = folder("a.mp4", "sub/b c.mp4", train=text)
    listing = VIDEO_LAYOUTS["csv"](root, None)
    assert listing.class_names == ("run", "walk")
    assert named(listing, "train", root) == [("a.mp4", 1), ("sub/b c.mp4", 0)]
    assert set(listing.videos) == {"train"}


def test_lists_by_spaces_with_numbers(folder):
    root = folder("a.mp4", "b.mp4", train="a.mp4 11\nb.mp4 2\n", val="b.mp4 0\n", test="a.mp4 9\n")
    listing = VIDEO_LAYOUTS["csv"](root, None)
    assert listing.class_names == tuple(map(str, range(12)))  # 2 before 11
    assert named(listing, "train", root) == [("a.mp4", 11), ("b.mp4", 2)]
    assert named(listing, "valid", root) == [("b.mp4", 0)]
    assert named(listing, "test", root) == [("a.mp4", 9)]


def test_classes_of_a_file(folder):
    root = folder("a.mp4", train="a.mp4,walk\na.mp4,0\n")
    (root / "classes.txt").write_text("walk\nrun\njump\n")
    listing = VIDEO_LAYOUTS["csv"](root, None)
    assert listing.class_names == ("walk", "run", "jump")
    assert [video.label for video in listing.videos["train"]] == [0, 0]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({}, "which has no list; expected train.csv"),
        ({"train": "a.mp4,walk\na.mp4\n"}, r"train\.csv:2 is 'a\.mp4'; expected path,label"),
        ({"train": "a.mp4,b,c,d\n"}, r"train\.csv:1 is .*; expected"),
        ({"train": "\n"}, "is an empty list"),
        ({"train": "a.mp4,walk\n", "test": "\na.mp4,swim\n"}, r"test\.csv:2: label is 'swim'; expected one of the 1"),
        ({"train": "a.mp4,1\n", "test": "a.mp4,2\n"}, r"test\.csv:1: label is '2'; expected one of the 2 classes"),
    ],
)
def test_bad_lists(lists, message, folder):
    with pytest.raises(ValueError, match=message):
        VIDEO_LAYOUTS["csv"](folder("a.mp4", **lists), None)


def test_listed_files_that_are_missing_are_named(folder):
    root = folder("a.mp4", train="a.mp4,0\n" + "".join(f"gone{i}.mp4,0\n" for i in range(7)))
    with pytest.raises(FileNotFoundError, match=r"7 files that do not exist \(.*gone0.*gone4\.mp4 and 2 more"):
        VIDEO_LAYOUTS["csv"](root, None)


def test_a_folder_a_class(folder):
    root = folder("train/b/2.mp4", "train/b/1.AVI", "train/a/3.mkv", "train/a/notes.txt", "val/a/4.mp4")
    (root / "val" / "b").mkdir()
    listing = VIDEO_LAYOUTS["folders"](root, None)
    assert listing.class_names == ("a", "b")
    assert named(listing, "train", root) == [("train/a/3.mkv", 0), ("train/b/1.AVI", 1), ("train/b/2.mp4", 1)]
    assert named(listing, "valid", root) == [("val/a/4.mp4", 0)]
    folder("val/c/5.mp4")
    with pytest.raises(ValueError, match=r"other classes than the training videos \(c\)"):
        VIDEO_LAYOUTS["folders"](root, None)
    with pytest.raises(ValueError, match="which has no split; expected folders train"):
        VIDEO_LAYOUTS["folders"](root / "train", None)


def test_smarthome_names():
    assert parse_smarthome_name(Path("x/Cook.Cleandishes_p02_r00_v02_c03.mp4")) == ("Cook.Cleandishes", 2, 3)
    assert parse_smarthome_name(Path("WatchTV_p25_r10_v31_c07.mp4")) == ("WatchTV", 25, 7)
    for name in ("WatchTV.mp4", "WatchTV_p25_r10_v31.mp4", "WatchTV_p25_r10_v31_c07_x.mp4", "p25_r10_v31_c07.mp4"):
        assert parse_smarthome_name(Path(name)) is None


def test_smarthome_protocols(folder):
    subjects = (2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 25)  # the data set's 18
    every = [f"Walk_p{s:02d}_r00_v00_c{c:02d}.mp4" for s in subjects for c in range(1, 8)]
    root = folder(*every, "Cook.Cut_p03_r00_v00_c01.mp4", "notes.txt")
    names = {"cross-subject": ["train", "test"], "cross-view-1": ["train", "test", "valid"]}
    expected = {
        "cross-subject": lambda s, c: "train" if s in (3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25) else "test",
        "cross-view-1": lambda s, c: {1: "train", 5: "valid", 2: "test"}.get(c),
        "cross-view-2": lambda s, c: {5: "valid", 2: "test"}.get(c, "train"),
    }
    assert set(SMARTHOME_PROTOCOLS) == set(expected)
    for protocol, split_of in expected.items():
        listing = VIDEO_LAYOUTS["smarthome"](root, protocol)
        walk = listing.class_names.index("Walk")
        for split in ("train", "valid", "test"):
            wanted = {
                f"Walk_p{s:02d}_r00_v00_c{c:02d}.mp4" for s in subjects for c in range(1, 8) if split_of(s, c) == split
            }
            found = {video.path.name for video in listing.videos.get(split, ()) if video.label == walk}
            assert found == wanted, (protocol, split)
        assert set(listing.videos) == set(names.get(protocol, ("train", "valid", "test")))
        left_out = " ".join(listing.notes)
        assert ("1 files of activities outside the protocol: Cook.Cut" in left_out) == (protocol != "cross-subject")
        assert ("72 files of cameras outside the protocol" in left_out) == (protocol == "cross-view-1")
    assert len(VIDEO_LAYOUTS["smarthome"](root, None).class_names) == len(_CROSS_SUBJECT_CLASSES) == 31
    assert len(_CROSS_VIEW_CLASSES) == 19
    assert list(_CROSS_SUBJECT_CLASSES) == sorted(_CROSS_SUBJECT_CLASSES)
    assert set(_CROSS_VIEW_CLASSES) < set(_CROSS_SUBJECT_CLASSES)


def test_smarthome_files_with_other_names_are_counted(folder):
    root = folder("mp4/Walk_p03_r00_v00_c01.mp4", "mp4/holiday.mp4")
    listing = VIDEO_LAYOUTS["smarthome"](root, None)
    assert [video.path.name for video in listing.videos["train"]] == ["Walk_p03_r00_v00_c01.mp4"]
    assert listing.notes == ("1 files whose name is not of the form ACTIVITY_pSS_rRR_vVV_cCC: holiday.mp4",)
    with pytest.raises(ValueError, match="protocol is 'cs'; expected one of cross-subject, cross-view-1, cross-view-2"):
        VIDEO_LAYOUTS["smarthome"](root, "cs")
    (root / "mp4" / "Walk_p03_r00_v00_c01.mp4").unlink()
    with pytest.raises(ValueError, match=r"no such videos but holiday\.mp4; expected a folder with names like"):
        VIDEO_LAYOUTS["smarthome"](root, None)
    with pytest.raises(ValueError, match="no such videos; expected a folder with names like"):
        VIDEO_LAYOUTS["smarthome"](root.parent, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.mp4,0\na.mp4,999999999\n", "train.csv:2: label is '999999999' for 'a.mp4', which has '0' above"),
        ("a.mp4,0\nb.mp4,999999999\n", "train.csv:2: label is 999999999; expected a number of a class, below 1000"),
        ("a.mp4,0\nb.mp4," + "9" * 5000 + "\n", "train.csv:2: label is 9999"),
        ("a.mp4,walk\na.mp4,run\n", "label is 'run' for 'a.mp4', which has 'walk' above; expected one label"),
        ('a.mp4,"walk\nb.mp4,run\n', r"train.csv:1 is .*unexpected end of data.*; expected columns"),
        ('a.mp4,"walk"x\nb.mp4,run\n', r"train.csv:1 is .*; expected columns"),
        (f"a.mp4,{'x' * 200_000}\n", "train.csv:1 is .*field larger than field limit"),
        (b"a.mp4,\xe9\n", "train.csv is not UTF-8"),
        (f"{'a' * 5000}.mp4,walk\n", "the list of videos is one with 1 files that do not exist"),
        ("a\0.mp4,walk\n", "the list of videos is one with 1 files that do not exist|NUL"),
    ],
    ids=range(10),
)
def test_values_that_a_list_cannot_have_are_refused(folder, text, message):
    root = folder("a.mp4", "b.mp4")
    (root / "train.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        VIDEO_LAYOUTS["csv"](root, None)
    assert "\n" not in str(caught.value)


def test_a_split_may_lack_a_class_and_hidden_folders_are_none(folder):
    root = folder(
        "train/run/a.mp4", "train/walk/b.mp4", "train/.ipynb_checkpoints/a.mp4", "val/walk/c.mp4", "val/.x/c.mp4"
    )
    listing = VIDEO_LAYOUTS["folders"](root, None)
    assert listing.class_names == ("run", "walk")
    assert named(listing, "train", root) == [("train/run/a.mp4", 0), ("train/walk/b.mp4", 1)]
    assert named(listing, "valid", root) == [("val/walk/c.mp4", 1)]
