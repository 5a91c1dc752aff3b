"""Which videos a data set has: what a folder's lists or the folder itself say, by a registered layout.

A layout is a function from a folder (and, where it has several, the name of a protocol) to a `Listing`.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from recurra.data.batches import SPLITS, Split
from recurra.registry import Registry

VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts")
"""Files of a folder that are taken for videos, whatever the case."""
_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "val", "validation"),
    "test": ("test",),
}
_FIRST_OF_A_HEADER = ("path", "file", "filename", "video", "video_path", "video_name")
_NAMED_IN_A_MESSAGE = 5


class Video(NamedTuple):
    """A video file and the number of its class."""

    path: Path
    label: int


class Listing(NamedTuple):
    """The videos of each split that there is. class_names: the name of each label. notes: what was left out."""

    class_names: tuple[str, ...]
    videos: Mapping[Split, Sequence[Video]]
    notes: tuple[str, ...] = ()


Layout: TypeAlias = Callable[[Path, str | None], Listing]
VIDEO_LAYOUTS: Registry[Layout] = Registry("video layout")
"""How a data set lies on the disk, by name."""


@VIDEO_LAYOUTS.register("csv")
def csv_listing(folder: Path, protocol: str | None = None) -> Listing:
    """Lists train.csv, valid.csv (or val.csv) and test.csv in a folder; a list may be absent.

    A line is `path,label` or `path,pose,label`; all lines of a list have the same number of columns, and the pose is
    not read. Columns are separated by commas, or, where the first line has none, by spaces (then no path may hold
    one). A first line whose first column is "path", "file", "filename", "video", "video_path" or "video_name" is a
    header. Paths are relative to the list's folder or absolute. Labels are all whole numbers from 0 (any number of
    classes up to the largest), or all names, numbered in alphabetical order over the training list. A file
    classes.txt beside the lists, one name a line, sets names and numbers itself.

    Raises ValueError for a line that is none of this, naming list and line, and FileNotFoundError naming the listed
    files that do not exist.
    """
    refuse_protocol("csv", protocol)
    rows: dict[Split, list[tuple[str, str, str]]] = {}
    for split in SPLITS:
        path = _first_file(folder, [f"{name}.csv" for name in _SPLIT_NAMES[split]])
        if path is not None:
            rows[split] = _read_list(path)
    if not rows:
        raise ValueError(f"{folder} holds none of the lists train.csv, valid.csv (or val.csv) and test.csv")
    names = _class_names(folder, rows)
    numbers = {name: number for number, name in enumerate(names)}
    videos: dict[Split, list[Video]] = {}
    for split, listed in rows.items():
        videos[split] = []
        for path_text, label, where in listed:
            number = numbers.get(label, int(label) if label.isdecimal() else -1)
            if not 0 <= number < len(names):
                raise ValueError(
                    f"{where}: the label {label!r} is none of the {len(names)} classes of the training list"
                )
            videos[split].append(Video(folder / path_text, number))
    _require_files(video.path for listed in videos.values() for video in listed)
    return Listing(names, videos)


@VIDEO_LAYOUTS.register("folders")
def folders_listing(folder: Path, protocol: str | None = None) -> Listing:
    """A folder for each split (train, valid or val, test), and in it a folder for each class with its videos.

    The classes are the folders of the training split (of all splits where there is none), in alphabetical order.

    Raises ValueError where there is no such folder, or a split has a class that training has not.
    """
    refuse_protocol("folders", protocol)
    found = {
        split: next((folder / name for name in _SPLIT_NAMES[split] if (folder / name).is_dir()), None)
        for split in SPLITS
    }
    roots = {split: root for split, root in found.items() if root is not None}
    if not roots:
        raise ValueError(f"{folder} holds none of the folders train, valid (or val) and test")
    naming = [roots["train"]] if "train" in roots else list(roots.values())
    names = tuple(sorted({place.name for root in naming for place in root.iterdir() if place.is_dir()}))
    videos: dict[Split, list[Video]] = {}
    for split, root in roots.items():
        unknown = sorted({place.name for place in root.iterdir() if place.is_dir()} - set(names))
        if unknown:
            raise ValueError(f"{root} has classes that the training videos have not: {some(unknown)}")
        videos[split] = [Video(path, label) for label, name in enumerate(names) for path in video_files(root / name)]
    return Listing(names, videos)


@VIDEO_LAYOUTS.register("ucf101")
def ucf101_listing(folder: Path, protocol: str | None = None) -> Listing:
    """UCF101: a folder for each class, and trainlist01.txt and testlist01.txt in it or in its ucfTrainTestlist.

    protocol: "1" (the default), "2" or "3", the number of the lists. Their lines are CLASS/FILE.avi, in the training
    list with a number that is not read. There is no validation list.

    Raises FileNotFoundError for a list or for listed videos that do not exist.
    """
    number = protocol or "1"
    if number not in ("1", "2", "3"):
        raise ValueError(f"layout 'ucf101' has the protocols '1', '2' and '3', got {protocol!r}")
    rows: dict[Split, list[Path]] = {}
    for split in ("train", "test"):
        name = f"{split}list0{number}.txt"
        path = _first_file(folder, [name, f"ucfTrainTestlist/{name}"])
        if path is None:
            raise FileNotFoundError(f"{name} is neither in {folder} nor in its ucfTrainTestlist")
        lines = path.read_text(encoding="utf-8").splitlines()
        rows[split] = [folder / line.split()[0] for line in lines if line.strip()]
    names = tuple(sorted({path.parent.name for path in rows["train"]}))
    unknown = sorted({path.parent.name for path in rows["test"]} - set(names))
    if unknown:
        raise ValueError(f"the test list has classes that the training list has not: {some(unknown)}")
    numbers = {name: label for label, name in enumerate(names)}
    _require_files(path for paths in rows.values() for path in paths)
    return Listing(
        names, {split: [Video(path, numbers[path.parent.name]) for path in paths] for split, paths in rows.items()}
    )


def video_files(folder: Path) -> list[Path]:
    """The videos directly in a folder, by their suffix, in alphabetical order."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)


def refuse_protocol(layout: str, protocol: str | None) -> None:
    """Raise ValueError for a protocol in a layout that has none."""
    if protocol is not None:
        raise ValueError(f"layout {layout!r} has no protocols, got {protocol!r}")


def some(things: Sequence[object]) -> str:
    """The first few of a list, and how many more there are."""
    text = ", ".join(map(str, things[:_NAMED_IN_A_MESSAGE]))
    rest = len(things) - _NAMED_IN_A_MESSAGE
    return f"{text} and {rest} more" if rest > 0 else text


def _first_file(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_list(path: Path) -> list[tuple[str, str, str]]:
    """The (path, label, "file:line") of each line of a list."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = [(number, line) for number, line in enumerate(file.read().splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} lists no videos")
    by_commas = "," in lines[0][1]
    texts = [line for _, line in lines]
    split_lines = list(csv.reader(texts, skipinitialspace=True)) if by_commas else [line.split() for line in texts]
    rows = []
    for (number, line), columns in zip(lines, split_lines):
        columns = [column.strip() for column in columns]
        if number == lines[0][0] and columns[0].lower() in _FIRST_OF_A_HEADER:
            continue
        if len(columns) != len(split_lines[0]) or len(columns) not in (2, 3) or not (columns[0] and columns[-1]):
            raise ValueError(
                f"{path}:{number}: expected path,label or path,pose,label, alike in all lines, got {line!r}"
            )
        rows.append((columns[0], columns[-1], f"{path}:{number}"))
    return rows


def _class_names(folder: Path, rows: Mapping[Split, list[tuple[str, str, str]]]) -> tuple[str, ...]:
    listed = folder / "classes.txt"
    if listed.is_file():
        names = tuple(line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip())
        if len(set(names)) != len(names):
            raise ValueError(f"{listed} names a class twice")
        return names
    naming = [rows["train"]] if "train" in rows else list(rows.values())
    labels = {label for listed_rows in naming for _, label, _ in listed_rows}
    if all(label.isdecimal() for label in labels):
        return tuple(str(number) for number in range(max(map(int, labels), default=-1) + 1))
    return tuple(sorted(labels))


def _require_files(paths: Iterable[Path]) -> None:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the listed videos do not exist: {some(missing)}; "
            "paths in a list are relative to the list's folder"
        )
