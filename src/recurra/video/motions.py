"""Motions: a generated video task that one half of a video cannot solve, written as real mp4 files.

A shape moves in one direction in the first half of a video, and in another, drawn independently, in the second. Picture
and movement wrap around at the edges and the start is uniform, so the position in one half says nothing about the other
half; nor do shape, colour, size, speed and background, which stay the same. With K directions the class is the ordered
pair, one of K * K: a model that sees one half is right for at most 1/K of the videos; chance is 1/K^2.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from recurra._files.digests import read_stamped, write_stamped
from recurra._files.writing import discard, leftovers, locked, put_in_place
from recurra.checks import fields_of, require, require_whole_number, sentence
from recurra.data._files import progress, user_cache_folder
from recurra.data.batches import MOTIONS, random_generator
from recurra.video.data import VideoConfig, VideoData
from recurra.video.reader import VideoInfo

_DIRECTIONS = {
    "right": (1, 0),
    "down": (0, 1),
    "left": (-1, 0),
    "up": (0, -1),
    "right-down": (1, 1),
    "left-up": (-1, -1),
    "right-up": (1, -1),
    "left-down": (-1, 1),
}
"""Columns and rows per frame of each direction; a task with K directions takes the first K. The first two differ in
their axis, which shows in the places that a shape passes, whatever their order; from three on, the order counts."""
_FRAMES_PER_SECOND = 8
_CODECS = ("libx264", "mpeg4")
_FORMAT = 3  # of the videos and lists


@dataclass(frozen=True)
class MotionsConfig:
    """The generated task and its clips. The videos are written on first use, without a download."""

    path: str | None = None
    """Folder for the videos: a new one, or one that already has the same videos. None: in the user's cache folder."""
    n_videos: int = 2000
    """Videos in total: a tenth each, rounded down, for validation and test, and the rest for training."""
    n_motions: int = 4
    """Number of directions, 2 to 8: the first of right, down, left, up and the diagonals."""
    frames_per_motion: int = 8
    """Frames in each half of a video."""
    image_size: int = 32
    """Pixels on a side; an even number."""
    n_frames: int = 8
    """Frames in a segment."""
    n_segments: int = 2
    """Segments in a clip. A clip spans the whole video: with two segments, each sees one motion."""
    label_segments: Literal["all", "last"] = "all"
    """Training: the segments that have the label as their target. In evaluation, it is always the last one."""
    batch_size: int = 32
    """Clips in a training step, over all ranks together."""
    eval_batch_size: int = 64
    """Clips in an evaluation step, over all ranks together."""
    workers: int = 1
    """Threads that prepare clips one step ahead. The frames of all videos stay in memory once they are read."""
    seed: int = 0
    """Seed of the videos and of the training order."""

    def __post_init__(self) -> None:
        require_whole_number(10, **fields_of(self, "data", "n_videos"))
        require_whole_number(2, **fields_of(self, "data", "n_motions", "frames_per_motion"))
        require_whole_number(16, **fields_of(self, "data", "image_size"))
        require(self.n_motions <= len(_DIRECTIONS), "data.n_motions", self.n_motions, f"at most {len(_DIRECTIONS)}")
        require(self.image_size % 2 == 0, "data.image_size", self.image_size, "an even number, as video colours need")
        self._videos(Path())  # checks the other fields

    def clip_rate(self, video: VideoInfo) -> tuple[float, int | None]:
        """Return the frames per second at which a clip shows a video, all of it, and their number."""
        return self._videos(Path()).clip_rate(video)

    def build(self, *, rank: int = 0, world_size: int = 1) -> VideoData:
        """Write the videos if they do not exist yet, and open them."""
        sizes = (self.n_videos, self.n_motions, self.frames_per_motion, self.image_size, self.seed)
        own = "-".join(map(str, ("motions", *sizes, f"v{_FORMAT}")))
        folder = user_cache_folder() / own if self.path is None else Path(self.path).expanduser()
        names = ("n_videos", "n_motions", "frames_per_motion", "image_size", "seed")
        write_motions(folder, **{name: getattr(self, name) for name in names})
        return self._videos(folder).build(rank=rank, world_size=world_size)

    def _videos(self, folder: Path) -> VideoConfig:
        shared = ("n_frames", "n_segments", "image_size", "label_segments", "batch_size", "eval_batch_size")
        return VideoConfig(
            path=str(folder),
            **{field: getattr(self, field) for field in (*shared, "workers", "seed")},
            scale_jitter=(self.image_size, self.image_size),
            flip=False,  # a mirrored video is of another class
            test_views=1,
            test_crops=1,
            on_bad_file="error",
            keep_decoded=True,
        )


def write_motions(
    folder: str | os.PathLike[str],
    n_videos: int,
    *,
    n_motions: int = 4,
    frames_per_motion: int = 8,
    image_size: int = 32,
    seed: int = 0,
) -> None:
    """Write the videos, the lists train.csv, valid.csv and test.csv, and classes.txt into a folder.

    What is drawn depends on the arguments alone; the encoder may round it differently from call to call.

    Does nothing if the folder already has exactly these. The folder appears whole or not at all. Of several processes
    one writes it, and the others wait.

    Raises ValueError for a folder with other content, and ImportError if PyAV is missing.
    """
    folder = Path(folder)
    made_from = {"format": _FORMAT, "n_videos": n_videos, "n_motions": n_motions}
    made_from |= {"frames_per_motion": frames_per_motion, "image_size": image_size, "seed": seed}
    if _holds(folder, made_from):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")) as exclusive:
        for temporary, name in leftovers(folder.parent) if exclusive else ():
            if name == folder.name:  # of a killed process
                discard(temporary)
        if not _holds(folder, made_from):
            if folder.is_dir():  # an empty one, which the new one replaces
                folder.rmdir()
            with put_in_place(folder) as new:
                _write_folder(new, made_from)


def _write_folder(folder: Path, made_from: Mapping[str, int]) -> None:
    _, n_videos, n_motions, frames_per_motion, image_size, seed = made_from.values()
    (folder / "videos").mkdir(parents=True)
    directions = list(_DIRECTIONS)[:n_motions]
    names = [f"{first} then {second}" for first in directions for second in directions]
    lines = []
    with progress("writing the videos", n_videos) as count:
        for number in range(n_videos):
            random = random_generator(seed, MOTIONS, number)
            first, second = (int(motion) for motion in random.integers(0, n_motions, size=2))
            pictures = _draw_motions(first, second, frames_per_motion, image_size, random)
            place = f"videos/{number:06d}.mp4"
            _write_video(folder / place, pictures)
            lines.append(f"{place},{names[first * n_motions + second]}\n")
            count(1)
    tenth = n_videos // 10
    ends = {"train": n_videos - 2 * tenth, "valid": n_videos - tenth, "test": n_videos}
    for split, end in ends.items():
        listed = lines[0 if split == "train" else end - tenth : end]
        (folder / f"{split}.csv").write_text("path,label\n" + "".join(listed), encoding="utf-8")
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    write_stamped(folder / "motions.json", made_from)


def _draw_motions(
    first: int, second: int, frames_per_motion: int, image_size: int, random: np.random.Generator
) -> UInt8[np.ndarray, "N S S 3"]:
    """Draw the pictures of one video: `frames_per_motion` frames in direction `first`, then as many in `second`."""
    size = image_size
    outline = _OUTLINES[int(random.integers(len(_OUTLINES)))]
    radius = random.uniform(size / 8, size / 5)
    speed = random.uniform(size / 12, size / 7)
    colour = random.uniform(60, 255, size=3)
    colour[random.integers(3)] = 255
    position = random.uniform(0, size, size=2)  # column, row
    background = random.uniform(0, 70, size=(size, size, 3))
    vectors = list(_DIRECTIONS.values())
    pictures = np.empty((2 * frames_per_motion, size, size, 3), dtype=np.uint8)
    for number in range(len(pictures)):
        if number:
            motion = first if number < frames_per_motion else second
            position = (position + speed * np.array(vectors[motion])) % size
        inside = outline(*_offsets(position, size), radius)[..., None]
        flicker = random.uniform(-10, 10, size=(size, size, 3))
        pictures[number] = np.clip(background * (1 - inside) + colour * inside + flicker, 0, 255)
    return pictures


def _offsets(position: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Measure columns and rows from the position to each pixel, the shorter way around: (size, size) each."""
    axis = (np.arange(size)[None] - position[:, None] + size / 2) % size - size / 2
    return axis[0][None, :], axis[1][:, None]


def _soft(distance: np.ndarray, radius: float) -> np.ndarray:
    """Return 1 inside and 0 outside, with one pixel of transition."""
    return np.clip(radius - distance + 0.5, 0, 1)


_OUTLINES: tuple[Callable[[np.ndarray, np.ndarray, float], np.ndarray], ...] = (
    lambda x, y, radius: _soft(np.hypot(x, y), radius),
    lambda x, y, radius: _soft(np.maximum(abs(x), abs(y)), 0.9 * radius),
    lambda x, y, radius: _soft(abs(x) + abs(y), 1.3 * radius),
    lambda x, y, radius: _soft(abs(np.hypot(x, y) - 0.75 * radius), 0.35 * radius),
)


def _write_video(path: Path, pictures: UInt8[np.ndarray, "N S S 3"]) -> None:
    import av

    codec = next(name for name in _CODECS if name in av.codecs_available)
    options = {"preset": "veryfast", "crf": "10"} if codec == "libx264" else {"qscale": "2"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=_FRAMES_PER_SECOND, options=options)
        stream.width = stream.height = pictures.shape[1]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _holds(folder: Path, made_from: Mapping[str, object]) -> bool:
    """Tell whether the folder has these motions. Raises ValueError if it has other content."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    try:
        found = read_stamped(folder / "motions.json")
    except FileNotFoundError:
        got = f"{folder}, which has other files"
        raise ValueError(sentence("path", got, "a new or empty folder, or one with these motions")) from None
    if found != made_from:
        got = f"{folder}, which has other motions ({found})"
        raise ValueError(sentence("path", got, f"a new folder for {made_from}"))
    return True
