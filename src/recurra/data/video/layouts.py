"""The videos of a data set, listed from its folder by a registered layout.

A layout is a function from a folder, and the name of a protocol if the layout has several, to a `Listing`.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from recurra.checks import require, require_choice, sentence
from recurra.data.batches import SPLITS, Split
from recurra.files.reading import read_text
from recurra.registry import Registry

VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts")
"""Suffixes of the files that count as videos, in upper or lower case."""
_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "val", "validation"),
    "test": ("test",),
}
_FIRST_OF_A_HEADER = ("path", "file", "filename", "video", "video_path", "video_name")
_NAMED_IN_A_MESSAGE = 5
_SHOWN = 200  # characters of a line in a message
_MOST_BYTES = 256 * 2**20
_MOST_DIGITS = 9
_MOST_CLASSES_OF_FEW = 1000


class Video(NamedTuple):
    """A video file and the number of its class."""

    path: Path
    label: int


class Listing(NamedTuple):
    """The videos of each split. class_names: the name of each label. notes: which files were skipped."""

    class_names: tuple[str, ...]
    videos: Mapping[Split, Sequence[Video]]
    notes: tuple[str, ...] = ()


Layout: TypeAlias = Callable[[Path, str | None], Listing]
VIDEO_LAYOUTS: Registry[Layout] = Registry("video layout")
"""How data sets are laid out on disk, by name."""


@VIDEO_LAYOUTS.register("csv")
def csv_listing(folder: Path, protocol: str | None = None) -> Listing:
    """Read the lists train.csv, valid.csv (or val.csv) and test.csv in a folder; not all of them have to exist.

    A line is `path,label` or `path,pose,label`; all lines of a list have the same number of columns, and the pose is
    ignored. Columns are separated by commas, or by spaces if the first line has no comma (then no path may contain a
    space). A first line is a header if its first column is "path", "file", "filename", "video", "video_path" or
    "video_name". Paths are absolute or relative to the folder of the list. Labels are either all whole numbers from 0,
    with classes up to the largest number (below 1000, or ten times the number of videos if that is more), or all names,
    numbered in alphabetical order over the training list. If there is a file classes.txt beside the lists, it gives the
    names in order, one per line. A video that is listed twice has the same label both times.

    Raises ValueError for any other line, naming list and line, and FileNotFoundError naming listed files that do not
    exist.
    """
    refuse_protocol("csv", protocol)
    lists: dict[Split, list[tuple[str, str, str]]] = {}
    for split in SPLITS:
        path = _first_file(folder, [f"{name}.csv" for name in _SPLIT_NAMES[split]])
        if path is not None:
            lists[split] = _read_list(path)
    if not lists:
        expected = "train.csv, valid.csv (or val.csv) or test.csv"
        raise ValueError(sentence("path", f"{folder}, which has no list", expected))
    names = _class_names(folder, lists)
    numbers = {name: number for number, name in enumerate(names)}
    videos: dict[Split, list[Video]] = {}
    for split, listed in lists.items():
        videos[split] = []
        for path_text, label, where in listed:
            number = numbers.get(label, _number(label))
            if number is None or number >= len(names):
                expected = f"one of the {len(names)} classes of the training list"
                raise ValueError(f"{where}: {sentence('label', repr(label), expected)}")
            videos[split].append(Video(folder / path_text, number))
    _require_files(video.path for listed in videos.values() for video in listed)
    return Listing(names, videos)


@VIDEO_LAYOUTS.register("folders")
def folders_listing(folder: Path, protocol: str | None = None) -> Listing:
    """List a folder per split (train, valid or val, test), each with a folder per class that has the videos.

    The classes are the folders of the training split, or of all splits if there is no training split, in alphabetical
    order; a split may lack some of them. Hidden folders are no classes.

    Raises ValueError if there is no such folder, or if a split has a class that training lacks.
    """
    refuse_protocol("folders", protocol)
    found = {
        split: next((folder / name for name in _SPLIT_NAMES[split] if (folder / name).is_dir()), None)
        for split in SPLITS
    }
    roots = {split: root for split, root in found.items() if root is not None}
    if not roots:
        raise ValueError(sentence("path", f"{folder}, which has no split", "folders train, valid (or val) or test"))
    naming = [roots["train"]] if "train" in roots else list(roots.values())
    names = tuple(sorted({name for root in naming for name in _class_folders(root)}))
    videos: dict[Split, list[Video]] = {}
    for split, root in roots.items():
        here = _class_folders(root)
        unknown = sorted(here - set(names))
        if unknown:
            came = f"a folder with other classes than the training videos ({some(unknown)})"
            raise ValueError(sentence(str(root), came, "the same classes"))
        labels = [(label, root / name) for label, name in enumerate(names) if name in here]
        videos[split] = [Video(path, label) for label, place in labels for path in video_files(place)]
    return Listing(names, videos)


def _class_folders(root: Path) -> set[str]:
    return {place.name for place in root.iterdir() if place.is_dir() and not place.name.startswith(".")}


@VIDEO_LAYOUTS.register("ucf101")
def ucf101_listing(folder: Path, protocol: str | None = None) -> Listing:
    """List UCF101: a folder per class, with trainlist01.txt and testlist01.txt beside them or in ucfTrainTestlist.

    protocol: "1" (the default), "2" or "3", the number of the lists. Their lines are CLASS/FILE.avi, followed in the
    training list by a number that is ignored. There is no validation list.

    Raises FileNotFoundError for a list or for listed videos that do not exist.
    """
    number = protocol or "1"
    require_choice(("1", "2", "3"), protocol=number)
    lists: dict[Split, list[Path]] = {}
    for split in ("train", "test"):
        name = f"{split}list0{number}.txt"
        path = _first_file(folder, [name, f"ucfTrainTestlist/{name}"])
        if path is None:
            expected = f"{name} in the folder or in its ucfTrainTestlist"
            raise FileNotFoundError(sentence("path", f"{folder}, which has no {name}", expected))
        lines = read_text(path, most_bytes=_MOST_BYTES).splitlines()
        lists[split] = [folder / line.split()[0] for line in lines if line.strip()]
    names = tuple(sorted({path.parent.name for path in lists["train"]}))
    unknown = sorted({path.parent.name for path in lists["test"]} - set(names))
    if unknown:
        came = f"a list with other classes than the training list ({some(unknown)})"
        raise ValueError(sentence("the test list", came, "the same classes"))
    numbers = {name: label for label, name in enumerate(names)}
    _require_files(path for paths in lists.values() for path in paths)
    return Listing(
        names, {split: [Video(path, numbers[path.parent.name]) for path in paths] for split, paths in lists.items()}
    )


def video_files(folder: Path) -> list[Path]:
    """List the videos directly in a folder, by suffix, in alphabetical order."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)


def refuse_protocol(layout: str, protocol: str | None) -> None:
    """Raise ValueError for a protocol of a layout that has none."""
    require(protocol is None, "protocol", protocol, f"null for layout {layout}, which has no protocols")


def some(things: Sequence[object]) -> str:
    """Name the first few things of a list, and how many more there are."""
    text = ", ".join(map(str, things[:_NAMED_IN_A_MESSAGE]))
    rest = len(things) - _NAMED_IN_A_MESSAGE
    return f"{text} and {rest} more" if rest > 0 else text


def _first_file(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_list(path: Path) -> list[tuple[str, str, str]]:
    """Read the (path, label, "file:line") of each line of a list."""
    text = read_text(path, most_bytes=_MOST_BYTES).removeprefix("\ufeff")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(sentence(str(path), "an empty list", "a line for each video"))
    by_commas = "," in lines[0][1]
    split_lines = [_split(line, by_commas, f"{path}:{number}") for number, line in lines]
    entries = []
    labels: dict[str, str] = {}
    for (number, line), columns in zip(lines, split_lines):
        if number == lines[0][0] and columns[0].lower() in _FIRST_OF_A_HEADER:
            continue
        if len(columns) != len(split_lines[0]) or len(columns) not in (2, 3) or not (columns[0] and columns[-1]):
            expected = "path,label or path,pose,label, the same in all lines"
            raise ValueError(sentence(f"{path}:{number}", repr(line[:_SHOWN]), expected))
        if _label_differs(labels.setdefault(columns[0], columns[-1]), columns[-1]):
            came = f"{columns[-1]!r} for {columns[0]!r}, which has {labels[columns[0]]!r} above"
            raise ValueError(f"{path}:{number}: {sentence('label', came, 'one label for each video')}")
        entries.append((columns[0], columns[-1], f"{path}:{number}"))
    return entries


def _split(line: str, by_commas: bool, where: str) -> list[str]:
    if not by_commas:
        return line.split()
    try:
        # Each line alone and strictly: a quotation mark that is not closed would swallow the lines below.
        (columns,) = csv.reader([line], skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise ValueError(sentence(where, f"{line[:_SHOWN]!r} ({error})", "columns separated by commas")) from error
    return [column.strip() for column in columns]


def _label_differs(one: str, other: str) -> bool:
    # A name and the number of its class may stand for the same.
    return one != other and (_number(one) is None) == (_number(other) is None)


def _number(label: str) -> int | None:
    """Read a label that is a whole number; None if it is a name."""
    return int(label) if label.isascii() and label.isdecimal() and len(label) <= _MOST_DIGITS else None


def _class_names(folder: Path, lists: Mapping[Split, list[tuple[str, str, str]]]) -> tuple[str, ...]:
    listed = folder / "classes.txt"
    if listed.is_file():
        names = tuple(line.strip() for line in read_text(listed).splitlines() if line.strip())
        if len(set(names)) != len(names):
            raise ValueError(sentence(str(listed), "a list that names a class twice", "distinct names"))
        return names
    naming = [lists["train"]] if "train" in lists else list(lists.values())
    places = {label: where for entries in naming for _, label, where in entries}
    if not all(label.isascii() and label.isdecimal() for label in places):
        return tuple(sorted(places))
    # A class without videos may have a number, but a list of a thousand videos has not a million classes.
    most = max(_MOST_CLASSES_OF_FEW, 10 * sum(map(len, naming)))
    for label, where in places.items():
        number = _number(label)
        if number is None or number >= most:
            expected = f"a number of a class, below {most} in lists of this length"
            raise ValueError(f"{where}: {sentence('label', label[:_SHOWN], expected, 'classes are numbered from 0')}")
    return tuple(str(number) for number in range(max(map(int, places), default=-1) + 1))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # of a name that is too long, for one
        return False


def _require_files(paths: Iterable[Path]) -> None:
    missing = [path for path in paths if not _is_file(path)]
    if missing:
        came = f"one with {len(missing)} files that do not exist ({some(missing)})"
        mend = "paths in a list are relative to the folder of the list"
        raise FileNotFoundError(sentence("the list of videos", came, "files that exist", mend))
