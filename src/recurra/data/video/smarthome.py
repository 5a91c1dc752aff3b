"""Toyota Smarthome: its file names, classes and three protocols (S. Das et al., ICCV 2019)."""

import re
from pathlib import Path
from typing import NamedTuple

from recurra.checks import choose, sentence
from recurra.data.batches import Split
from recurra.data.video.layouts import VIDEO_LAYOUTS, Listing, Video, some, video_files

CROSS_SUBJECT_CLASSES = (
    "Cook.Cleandishes", "Cook.Cleanup", "Cook.Cut", "Cook.Stir", "Cook.Usestove", "Cutbread", "Drink.Frombottle",
    "Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack", "Enter", "Getup", "Laydown",
    "Leave", "Makecoffee.Pourgrains", "Makecoffee.Pourwater", "Maketea.Boilwater", "Maketea.Insertteabag",
    "Pour.Frombottle", "Pour.Fromcan", "Pour.Fromkettle", "Readbook", "Sitdown", "Takepills", "Uselaptop", "Usetablet",
    "Usetelephone", "Walk", "WatchTV",
)  # fmt: skip
"""The 31 classes of the cross-subject protocol."""
CROSS_VIEW_CLASSES = (
    "Cutbread", "Drink.Frombottle", "Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack",
    "Enter", "Getup", "Leave", "Pour.Frombottle", "Pour.Fromcan", "Readbook", "Sitdown", "Takepills", "Uselaptop",
    "Usetablet", "Usetelephone", "Walk",
)  # fmt: skip
"""The 19 classes of both cross-view protocols: those that enough cameras see."""
TRAINING_SUBJECTS = frozenset({3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25})
"""The subjects of cross-subject training; the others are in the test split."""


class SmarthomeName(NamedTuple):
    """The parts of a file name such as Cook.Cleandishes_p02_r00_v02_c03.mp4."""

    activity: str
    subject: int
    camera: int


class _Protocol(NamedTuple):
    class_names: tuple[str, ...]
    training_cameras: frozenset[int] | None  # None: by subject

    def split(self, name: SmarthomeName) -> Split | None:
        """Return the split of a video; None if the protocol does not use it."""
        if self.training_cameras is None:
            return "train" if name.subject in TRAINING_SUBJECTS else "test"
        if name.camera in self.training_cameras:
            return "train"
        return {5: "valid", 2: "test"}.get(name.camera)  # type: ignore[return-value]


SMARTHOME_PROTOCOLS = {
    "cross-subject": _Protocol(CROSS_SUBJECT_CLASSES, None),
    "cross-view-1": _Protocol(CROSS_VIEW_CLASSES, frozenset({1})),
    "cross-view-2": _Protocol(CROSS_VIEW_CLASSES, frozenset({1, 3, 4, 6, 7})),
}
"""The protocols, by name. Cross-view 1 trains on camera 1, cross-view 2 on cameras 1, 3, 4, 6 and 7; both validate on
camera 5 and test on camera 2."""

_NAME = re.compile(r"(?P<activity>[A-Za-z]+(?:\.[A-Za-z]+)?)_p(?P<subject>\d+)_r\d+_v\d+_c(?P<camera>\d+)")


def parse_smarthome_name(path: Path) -> SmarthomeName | None:
    """Parse the name of a file; None if it is not a Smarthome name.

    >>> parse_smarthome_name(Path("Cook.Cleandishes_p02_r00_v02_c03.mp4"))
    SmarthomeName(activity='Cook.Cleandishes', subject=2, camera=3)
    """
    match = _NAME.fullmatch(path.stem)
    return match and SmarthomeName(match["activity"], int(match["subject"]), int(match["camera"]))


@VIDEO_LAYOUTS.register("smarthome")
def smarthome_listing(folder: Path, protocol: str | None = None) -> Listing:
    """List Toyota Smarthome, from the folder with its videos or from the parent folder of `mp4`.

    protocol: "cross-subject" (the default), "cross-view-1" or "cross-view-2". Activities are numbered in alphabetical
    order. Files are skipped, and counted in the notes, if their name is not of the form ACTIVITY_pSS_rRR_vVV_cCC, or if
    their activity or camera is not in the protocol.

    In the paper, cross-subject has no validation split: hold out a share of the training videos for it, or use the test
    split only once, at the end.

    Raises ValueError for another protocol, and if no file has such a name.
    """
    chosen = choose("protocol", SMARTHOME_PROTOCOLS, protocol or "cross-subject")
    files = video_files(folder) or (video_files(folder / "mp4") if (folder / "mp4").is_dir() else [])
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
        came = f"{folder}, which has no such videos" + (f" but {some(misnamed)}" if misnamed else "")
        raise ValueError(sentence("path", came, "a folder with names like Cook.Cleandishes_p02_r00_v02_c03.mp4"))
    reasons = {
        "whose name is not of the form ACTIVITY_pSS_rRR_vVV_cCC": misnamed,
        "of activities outside the protocol": other_classes,
        "of cameras outside the protocol": other_cameras,
    }
    notes = tuple(f"{len(names)} files {reason}: {some(names)}" for reason, names in reasons.items() if names)
    return Listing(chosen.class_names, videos, notes)
