"""Toyota Smarthome: its file names, its classes and its three protocols (S. Das et al., ICCV 2019)."""

import re
from pathlib import Path
from typing import NamedTuple

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
"""The 19 classes of the two cross-view protocols: those that enough cameras see."""
TRAINING_SUBJECTS = frozenset({3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25})
"""The subjects of cross-subject training; the others are for the test."""


class SmarthomeName(NamedTuple):
    """What a file name says: Cook.Cleandishes_p02_r00_v02_c03.mp4."""

    activity: str
    subject: int
    camera: int


class _Protocol(NamedTuple):
    class_names: tuple[str, ...]
    training_cameras: frozenset[int] | None  # None: by subject

    def split(self, name: SmarthomeName) -> Split | None:
        """The split that a video belongs to; None where the protocol leaves it out."""
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
"""The protocols, by name. Cross-view 1 trains on camera 1, cross-view 2 on cameras 1, 3, 4, 6 and 7; both take
camera 5 for validation and camera 2 for the test."""

_NAME = re.compile(r"(?P<activity>[A-Za-z]+(?:\.[A-Za-z]+)?)_p(?P<subject>\d+)_r\d+_v\d+_c(?P<camera>\d+)")


def parse_smarthome_name(path: Path) -> SmarthomeName | None:
    """What the name of a file says; None where it is not a Smarthome name.

    >>> parse_smarthome_name(Path("Cook.Cleandishes_p02_r00_v02_c03.mp4"))
    SmarthomeName(activity='Cook.Cleandishes', subject=2, camera=3)
    """
    match = _NAME.fullmatch(path.stem)
    return match and SmarthomeName(match["activity"], int(match["subject"]), int(match["camera"]))


@VIDEO_LAYOUTS.register("smarthome")
def smarthome_listing(folder: Path, protocol: str | None = None) -> Listing:
    """Toyota Smarthome from the folder of its videos, or the one above with the videos in `mp4`.

    protocol: "cross-subject" (the default), "cross-view-1" or "cross-view-2". Activities are numbered in
    alphabetical order. Files whose name is not of the form ACTIVITY_pSS_rRR_vVV_cCC are left out and counted in the
    notes, and so are activities outside the protocol's classes and cameras outside its splits.

    Cross-subject has no validation split in the paper: hold out a share of the training videos for it, or look at
    the test split only at the end.

    Raises ValueError for another protocol, and where no file has such a name.
    """
    chosen = SMARTHOME_PROTOCOLS.get(protocol or "cross-subject")
    if chosen is None:
        raise ValueError(f"layout 'smarthome' has the protocols {', '.join(SMARTHOME_PROTOCOLS)}; got {protocol!r}")
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
        raise ValueError(
            f"{folder} holds no videos with names like Cook.Cleandishes_p02_r00_v02_c03.mp4"
            + (f", but {some(misnamed)}" if misnamed else "")
        )
    reasons = {
        "whose name is not of the form ACTIVITY_pSS_rRR_vVV_cCC": misnamed,
        "of activities outside the protocol": other_classes,
        "of cameras outside the protocol": other_cameras,
    }
    notes = tuple(f"{len(names)} files {reason}: {some(names)}" for reason, names in reasons.items() if names)
    return Listing(chosen.class_names, videos, notes)
