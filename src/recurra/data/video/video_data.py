"""Videos as a data set: the configuration, the splits, their batches and their views."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recurra.data.batches import SPLITS, Split
from recurra.data.cache import Cache
from recurra.data.fields import require_choice, require_rank, require_whole_number
from recurra.data.order import VIDEO_HELD_OUT, random_generator
from recurra.data.rows import RowOrder
from recurra.data.video.checked import CheckedVideo, check_videos
from recurra.data.video.clips import ClipMaker
from recurra.data.video.layouts import VIDEO_LAYOUTS, Listing, Video
from recurra.data.video.pyav import require_av
from recurra.data.video.sampling import FrameSampling
from recurra.data.video.sources import BadFiles, ClipSource, VideoViews

_OWNER = "VideoConfig"


@dataclass(frozen=True)
class VideoConfig:
    """Classification of the videos in a folder, in clips of several segments.

    Raises TypeError or ValueError, naming the field, for a value that cannot be.
    """

    path: str
    """Folder with the videos, or with the lists that name them."""
    layout: str = "csv"
    """How they lie there: csv (lists train.csv, valid.csv, test.csv), folders (SPLIT/CLASS/FILE), smarthome, ucf101."""
    protocol: str | None = None
    """Which of a layout's protocols: of smarthome cross-subject (the default), cross-view-1 or cross-view-2; of ucf101
    1 (the default), 2 or 3."""
    valid_share: float = 0.0
    """Where a layout has no validation split: the share of each class's training videos, drawn with the seed, that is
    held out for it. 0: there is none."""
    n_frames: int = 8
    """Frames of a segment."""
    n_segments: int = 2
    """Segments of a clip; a clip has n_segments * n_frames frames."""
    frame_rate: float | None = None
    """Frames per second of a clip. Without it and frame_stride a clip spans the whole video."""
    frame_stride: int | None = None
    """A clip takes every frame_stride-th frame of the video, instead of a frame rate."""
    image_size: int = 224
    """Pixels on a side of a frame as the model sees it."""
    scale_jitter: tuple[int, int] | None = None
    """Training: the shorter side is scaled to a number of pixels in this range. None: 8/7 to 10/7 of image_size, which
    is TimeSformer's 256 to 320 for 224."""
    flip: bool = True
    """Training: half of the clips are mirrored left to right."""
    label_segments: Literal["all", "last"] = "all"
    """Training: the segments that are asked for the label. The paper gives the input of the head in the first segment
    too, so all of them are asked. Evaluation always asks the last one."""
    batch_size: int = 8
    """Clips of a training step, over all ranks together."""
    eval_batch_size: int = 8
    """Clips of an evaluation step, over all ranks together."""
    test_views: int = 10
    """Clips along time of each video in a multi-view test."""
    test_crops: int = 3
    """Crops of each of them."""
    on_bad_file: Literal["skip", "error"] = "skip"
    """What becomes of files that are no videos, or have fewer than min_frames frames: left out with one warning, or an
    error. The row of one that fails while it is decoded is gray and has no targets."""
    min_frames: int = 2
    """Videos with fewer frames are too short."""
    workers: int = 1
    """Threads that decode, one step ahead of what is asked for. 0: decoded when asked for."""
    keep_decoded: bool = False
    """Keep the frames of every video that was read in memory, at their full size: for small data sets."""
    cache: str | None = None
    """Folder for what was found in the files; by default .recurra beside them, or the user's cache folder where that
    cannot be written."""
    seed: int = 0
    """Draws the order of training, the moments, scales, crops and flips, and the videos held out."""

    def __post_init__(self) -> None:
        require_choice(_OWNER, "layout", self.layout, tuple(VIDEO_LAYOUTS))
        if not 0 <= self.valid_share < 1:
            raise ValueError(f"{_OWNER}.valid_share must be a share, from 0 to below 1, got {self.valid_share}")
        require_choice(_OWNER, "label_segments", self.label_segments, ("all", "last"))
        require_choice(_OWNER, "on_bad_file", self.on_bad_file, ("skip", "error"))
        counts = ("n_frames", "n_segments", "image_size", "batch_size", "eval_batch_size", "test_views", "test_crops")
        for field in (*counts, "min_frames"):
            require_whole_number(_OWNER, field, getattr(self, field), 1)
        for field in ("workers", "seed"):
            require_whole_number(_OWNER, field, getattr(self, field), 0)
        if self.frame_rate is not None and self.frame_stride is not None:
            raise ValueError(
                f"{_OWNER} takes a frame_rate or a frame_stride, got both: {self.frame_rate} and {self.frame_stride}"
            )
        if self.frame_rate is not None and not 0 < self.frame_rate < float("inf"):
            raise ValueError(f"{_OWNER}.frame_rate must be a positive number of frames a second, got {self.frame_rate}")
        if self.frame_stride is not None:
            require_whole_number(_OWNER, "frame_stride", self.frame_stride, 1)
        low, high = self.short_sides
        require_whole_number(_OWNER, "scale_jitter", low, self.image_size)
        require_whole_number(_OWNER, "scale_jitter", high, low)

    @property
    def short_sides(self) -> tuple[int, int]:
        """The range that the shorter side is scaled to in training."""
        if self.scale_jitter is None:
            return round(self.image_size * 8 / 7), round(self.image_size * 10 / 7)
        low, high = self.scale_jitter
        return low, high

    def build(self, *, rank: int = 0, world_size: int = 1) -> "VideoData":
        """Find the videos; the files of a split are looked at when it is first asked for.

        Raises ValueError where `world_size` does not divide `batch_size`, where the folder does not lie as `layout`
        says, and for a protocol that the layout has not; FileNotFoundError for a folder or listed files that do not
        exist; ImportError where PyAV is missing.
        """
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            what = "a file; give the folder that it lies in" if folder.exists() else "not there"
            raise FileNotFoundError(f"{_OWNER}.path must be a folder, and {self.path} is {what}")
        listing = VIDEO_LAYOUTS[self.layout](folder, self.protocol)
        return VideoData(self, listing, folder=folder, rank=rank, world_size=world_size)


class VideoData:
    """The videos that a `VideoConfig` names.

    class_names: the name of each label. output_size: classes. n_frames: frames of a segment. n_segments: segments of
    a clip. image_size: pixels on a side.
    """

    def __init__(
        self, config: VideoConfig, listing: Listing, *, folder: Path, rank: int = 0, world_size: int = 1
    ) -> None:
        require_rank(_OWNER, rank, world_size, config.batch_size)
        require_av()
        self.config = config
        self.class_names = listing.class_names
        self.output_size = len(listing.class_names)
        self.n_frames, self.n_segments, self.image_size = config.n_frames, config.n_segments, config.image_size
        self.rank, self.world_size = rank, world_size
        self._listed: Mapping[Split, Sequence[Video]] = listing.videos
        if "valid" not in self._listed and config.valid_share:
            self._listed = hold_out(self._listed, config.valid_share, config.seed)
        self._store = Cache(folder, config.cache)
        self._checked: dict[Split, list[CheckedVideo]] = {}
        self._clips = ClipMaker(
            FrameSampling(config.n_segments * config.n_frames, config.frame_rate, config.frame_stride),
            image_size=config.image_size,
            scale_jitter=config.short_sides,
            flip=config.flip,
            seed=config.seed,
            kept={} if config.keep_decoded else None,
        )
        for note in listing.notes:
            warnings.warn(f"{folder}: {note}; they are left out", stacklevel=3)

    def videos(self, split: Split) -> list[CheckedVideo]:
        """The videos of a split that can be used, in the order of their lists.

        Raises ValueError for a split that is not there, and as `check_videos` says.
        """
        require_choice(type(self).__name__, "split", split, SPLITS)
        if split not in self._checked:
            if not self._listed.get(split):
                hint = "; set valid_share to hold some training videos out" if split == "valid" else ""
                there = ", ".join(self._listed) or "no videos at all"
                raise ValueError(f"{self.config.path} has no videos for the split {split!r}, only {there}{hint}")
            self._checked[split] = check_videos(
                self._in_words(split),
                self._listed[split],
                skip=self.config.on_bad_file == "skip",
                min_frames=self.config.min_frames,
                workers=self.config.workers,
                store=self._store,
            )
        return self._checked[split]

    def source(self, split: Split) -> ClipSource:
        """The batches of a split, a clip of each video: random ones in training, else the middle view and crop.

        Raises as `videos` does.
        """
        config, training, videos = self.config, split == "train", self.videos(split)
        order = RowOrder(
            len(videos),
            batch_size=config.batch_size if training else config.eval_batch_size,
            seed=config.seed if training else None,
            rank=self.rank,
            world_size=self.world_size,
        )
        return ClipSource(
            videos,
            self._clips,
            order,
            n_segments=self.n_segments,
            label_segments=config.label_segments if training else "last",
            bad_files=self._bad_files(split),
            workers=config.workers,
        )

    def views(self, split: Split) -> VideoViews:
        """All views of each video of a split: `test_views` clips along time, `test_crops` crops of each.

        Raises as `videos` does.
        """
        config = self.config
        return VideoViews(
            self.videos(split),
            self._clips,
            n_views=config.test_views,
            n_crops=config.test_crops,
            n_segments=self.n_segments,
            batch_size=config.eval_batch_size,
            bad_files=self._bad_files(split),
            workers=config.workers,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _bad_files(self, split: Split) -> BadFiles:
        return BadFiles(self._in_words(split), skip=self.config.on_bad_file == "skip")

    def _in_words(self, split: Split) -> str:
        return f"the {split} split of {self.config.path}"


def hold_out(listed: Mapping[Split, Sequence[Video]], share: float, seed: int) -> dict[Split, Sequence[Video]]:
    """Move a share of each class's training videos, rounded down but at least one of two, to a validation split.

    A pure function of the lists and the seed.
    """
    training = listed.get("train", ())
    by_class: dict[int, list[int]] = {}
    for place, video in enumerate(training):
        by_class.setdefault(video.label, []).append(place)
    held: set[int] = set()
    for label, places in by_class.items():
        if len(places) > 1:
            order = random_generator(seed, VIDEO_HELD_OUT, label).permutation(len(places))
            held.update(places[i] for i in order[: max(1, int(share * len(places)))])
    return {
        **listed,
        "train": [video for place, video in enumerate(training) if place not in held],
        "valid": [video for place, video in enumerate(training) if place in held],
    }
