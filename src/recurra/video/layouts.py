"""The videos of a data set, listed from its folder by a registered layout.

A layout is a function from a folder, and the name of a protocol if the layout has several, to a `Listing`.
"""

import csv
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from recurra._choices import SPLITS, Split
from recurra._files.reading import read_json, read_text
from recurra.checks import choose, require, sentence
from recurra.data._files import Cache, progress
from recurra.registry import Registry
from recurra.video.reader import VideoError, VideoInfo, probe_video

_VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts")
"""Suffixes of the files that count as videos, in upper or lower case."""
_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "val", "validation"),
    "test": ("test",),
}
_FIRST_OF_A_HEADER = ("path", "file", "filename", "video", "video_path", "video_name")
_NAMED_IN_A_MESSAGE = 5
_SHOWN = 200  # characters of a line in a message
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


_Layout: TypeAlias = Callable[[Path, str | None], Listing]
VIDEO_LAYOUTS: Registry[_Layout] = Registry("video layout")
"""How data sets are laid out on disk, by name."""


@VIDEO_LAYOUTS.register("csv")
def _csv_listing(folder: Path, protocol: str | None = None) -> Listing:
    """Read the lists train.csv, valid.csv (or val.csv) and test.csv in a folder; not all of them have to exist."""
    require(protocol is None, "protocol", protocol, "null for layout csv, which has no protocols")
    lists: dict[Split, list[tuple[str, str, str]]] = {}
    for split in SPLITS:
        paths = [folder / f"{name}.csv" for name in _SPLIT_NAMES[split] if (folder / f"{name}.csv").is_file()]
        if paths:
            lists[split] = _read_list(paths[0])
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
    missing = [video.path for listed in videos.values() for video in listed if not _is_file(video.path)]
    if missing:
        got = f"one with {len(missing)} files that do not exist ({_some(missing)})"
        hint = "paths in a list are relative to the folder of the list"
        raise FileNotFoundError(sentence("the list of videos", got, "files that exist", hint))
    return Listing(names, videos)


@VIDEO_LAYOUTS.register("folders")
def _folders_listing(folder: Path, protocol: str | None = None) -> Listing:
    """List a folder per split (train, valid or val, test), each with a folder per class; hidden folders are none."""
    require(protocol is None, "protocol", protocol, "null for layout folders, which has no protocols")
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
            got = f"a folder with other classes than the training videos ({_some(unknown)})"
            raise ValueError(sentence(str(root), got, "the same classes"))
        labels = [(label, root / name) for label, name in enumerate(names) if name in here]
        videos[split] = [Video(path, label) for label, place in labels for path in _video_files(place)]
    return Listing(names, videos)


def _class_folders(root: Path) -> set[str]:
    return {place.name for place in root.iterdir() if place.is_dir() and not place.name.startswith(".")}


def _video_files(folder: Path) -> list[Path]:
    """List the videos directly in a folder, by suffix, in alphabetical order."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _VIDEO_SUFFIXES)


def _some(things: Sequence[object]) -> str:
    """Name the first few things of a list, and how many more there are."""
    text = ", ".join(map(str, things[:_NAMED_IN_A_MESSAGE]))
    rest = len(things) - _NAMED_IN_A_MESSAGE
    return f"{text} and {rest} more" if rest > 0 else text


def _read_list(path: Path) -> list[tuple[str, str, str]]:
    """Read the (path, label, "file:line") of each line of a list."""
    text = read_text(path).removeprefix("\ufeff")
    lines = [(f"{path}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(sentence(str(path), "an empty list", "a line for each video"))
    by_commas = "," in lines[0][1]
    rows = [(where, line, _split(line, by_commas, where)) for where, line in lines]
    n_columns = len(rows[0][2])
    if rows[0][2][0].lower() in _FIRST_OF_A_HEADER:
        del rows[0]
    labels: dict[str, str] = {}
    for where, line, columns in rows:
        if len(columns) != n_columns or n_columns not in (2, 3) or not (columns[0] and columns[-1]):
            expected = "path,label or path,pose,label, the same in all lines"
            raise ValueError(sentence(where, repr(line[:_SHOWN]), expected))
        name, label = columns[0], columns[-1]
        above = labels.setdefault(name, label)
        # a name and the number of its class may stand for the same
        if above != label and (_number(above) is None) == (_number(label) is None):
            got = f"{label!r} for {name!r}, which has {above!r} above"
            raise ValueError(f"{where}: {sentence('label', got, 'one label for each video')}")
    return [(columns[0], columns[-1], where) for where, _, columns in rows]


def _split(line: str, by_commas: bool, where: str) -> list[str]:
    if not by_commas:
        return line.split()
    try:
        # Each line alone and strictly: a quotation mark that is not closed would swallow the lines below.
        (columns,) = csv.reader([line], skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise ValueError(sentence(where, f"{line[:_SHOWN]!r} ({error})", "columns separated by commas")) from error
    return [column.strip() for column in columns]


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


_CROSS_SUBJECT_CLASSES = (
    "Cook.Cleandishes", "Cook.Cleanup", "Cook.Cut", "Cook.Stir", "Cook.Usestove", "Cutbread", "Drink.Frombottle",
    "Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack", "Enter", "Getup", "Laydown",
    "Leave", "Makecoffee.Pourgrains", "Makecoffee.Pourwater", "Maketea.Boilwater", "Maketea.Insertteabag",
    "Pour.Frombottle", "Pour.Fromcan", "Pour.Fromkettle", "Readbook", "Sitdown", "Takepills", "Uselaptop", "Usetablet",
    "Usetelephone", "Walk", "WatchTV",
)  # fmt: skip
"""The 31 classes of the cross-subject protocol."""
_CROSS_VIEW_CLASSES = (
    "Cutbread", "Drink.Frombottle", "Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack",
    "Enter", "Getup", "Leave", "Pour.Frombottle", "Pour.Fromcan", "Readbook", "Sitdown", "Takepills", "Uselaptop",
    "Usetablet", "Usetelephone", "Walk",
)  # fmt: skip
"""The 19 classes of both cross-view protocols: those that enough cameras see."""
_TRAINING_SUBJECTS = frozenset({3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25})
"""The subjects of cross-subject training; the others are in the test split."""


class _SmarthomeName(NamedTuple):
    """The parts of a file name such as Cook.Cleandishes_p02_r00_v02_c03.mp4."""

    activity: str
    subject: int
    camera: int


class _Protocol(NamedTuple):
    class_names: tuple[str, ...]
    training_cameras: frozenset[int] | None  # None: by subject

    def split(self, name: _SmarthomeName) -> Split | None:
        if self.training_cameras is None:
            return "train" if name.subject in _TRAINING_SUBJECTS else "test"
        if name.camera in self.training_cameras:
            return "train"
        return {5: "valid", 2: "test"}.get(name.camera)  # type: ignore[return-value]


SMARTHOME_PROTOCOLS = {
    "cross-subject": _Protocol(_CROSS_SUBJECT_CLASSES, None),
    "cross-view-1": _Protocol(_CROSS_VIEW_CLASSES, frozenset({1})),
    "cross-view-2": _Protocol(_CROSS_VIEW_CLASSES, frozenset({1, 3, 4, 6, 7})),
}
"""The protocols, by name. Cross-view 1 trains on camera 1, cross-view 2 on cameras 1, 3, 4, 6 and 7; both validate on
camera 5 and test on camera 2."""

_NAME = re.compile(r"(?P<activity>[A-Za-z]+(?:\.[A-Za-z]+)?)_p(?P<subject>\d+)_r\d+_v\d+_c(?P<camera>\d+)")


def parse_smarthome_name(path: Path) -> _SmarthomeName | None:
    """Parse the name of a file; None if it is not a Smarthome name.

    >>> parse_smarthome_name(Path("Cook.Cleandishes_p02_r00_v02_c03.mp4"))
    SmarthomeName(activity='Cook.Cleandishes', subject=2, camera=3)
    """
    match = _NAME.fullmatch(path.stem)
    return match and _SmarthomeName(match["activity"], int(match["subject"]), int(match["camera"]))


@VIDEO_LAYOUTS.register("smarthome")
def _smarthome_listing(folder: Path, protocol: str | None = None) -> Listing:
    """List Toyota Smarthome, from the folder with its videos or from the parent folder of `mp4`."""
    chosen = choose("protocol", SMARTHOME_PROTOCOLS, protocol or "cross-subject")
    files = _video_files(folder) or (_video_files(folder / "mp4") if (folder / "mp4").is_dir() else [])
    numbers = {name: number for number, name in enumerate(chosen.class_names)}
    videos: dict[Split, list[Video]] = {}
    misnamed, other_classes, other_cameras = [], [], []
    for path in files:
        name = parse_smarthome_name(path)
        if name is None:
            misnamed.append(path.name)
        elif name.activity not in numbers:
            other_classes.append(path.name)
        elif (split := chosen.split(name)) is None:
            other_cameras.append(path.name)
        else:
            videos.setdefault(split, []).append(Video(path, numbers[name.activity]))
    if len(misnamed) == len(files):
        got = f"{folder}, which has no such videos" + (f" but {_some(misnamed)}" if misnamed else "")
        raise ValueError(sentence("path", got, "a folder with names like Cook.Cleandishes_p02_r00_v02_c03.mp4"))
    reasons = {
        "whose name is not of the form ACTIVITY_pSS_rRR_vVV_cCC": misnamed,
        "of activities outside the protocol": other_classes,
        "of cameras outside the protocol": other_cameras,
    }
    notes = tuple(f"{len(names)} files {reason}: {_some(names)}" for reason, names in reasons.items() if names)
    return Listing(chosen.class_names, videos, notes)


_FINDINGS = 1  # the format of cache entries


class CheckedVideo(NamedTuple):
    """A video that opens, is long enough, and whose first frame decodes."""

    path: Path
    label: int
    info: VideoInfo


def check_videos(what: str, videos: Sequence[Video], *, skip: bool, workers: int, store: Cache) -> list[CheckedVideo]:
    """Return the usable videos of a split, in order, with their frames, duration and size."""
    found = _findings([video.path for video in videos], workers, store)
    good, bad = [], []
    for video, finding in zip(videos, found):
        if isinstance(finding, str):
            bad.append(f"{video.path.name} ({finding})")
        elif finding.n_frames < 2:
            bad.append(f"{video.path.name} (a single frame)")
        else:
            good.append(CheckedVideo(video.path, video.label, finding))
    if bad and (not skip or not good):
        got = f"{len(videos)} files, {len(bad)} of them unusable ({_some(bad)})"
        raise VideoError(sentence(what, got, "videos of at least 2 frames"))
    if bad:
        warnings.warn(f"skipping {len(bad)} of {len(videos)} files of {what}, unusable: {_some(bad)}", stacklevel=3)
    return good


def _findings(paths: list[Path], workers: int, store: Cache) -> list[VideoInfo | str]:
    """Return what is known about each file, or the reason why it is unusable."""
    sizes = [(str(path), status.st_size, status.st_mtime_ns) for path in paths for status in (path.stat(),)]
    made_from = {
        "what": "what was found in video files",
        "findings": _FINDINGS,
        "files": hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
    }

    def write(out: Any) -> None:
        with progress("checking the videos", len(paths)) as count, ThreadPoolExecutor(max(1, workers)) as pool:
            looked = []
            for finding in pool.map(_look_at, paths):
                looked.append(finding)
                count(1)
        out.write(json.dumps(looked).encode())

    kept = read_json(store.get("videos", made_from, write), kind=list)
    return [finding if isinstance(finding, str) else VideoInfo(*finding) for finding in kept]


def _look_at(path: Path) -> VideoInfo | str:
    if not path.stat().st_size:
        return "an empty file"
    try:
        return probe_video(path)
    except VideoError as error:
        return str(error).removeprefix(f"{path} is ")
