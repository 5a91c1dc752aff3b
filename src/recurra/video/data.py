"""Batches of clips: one clip of each video, or all views of each video."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra._files.digests import json_sha256
from recurra.checks import (
    choose,
    fields_of,
    require,
    require_literal,
    require_literal_fields,
    require_positive,
    require_whole_number,
    sentence,
)
from recurra.data._files import Cache
from recurra.data.batches import (
    IGNORED_TARGET,
    VIDEO_HELD_OUT,
    Batch,
    Poses,
    SampleOrder,
    Split,
    random_generator,
    require_rank,
    require_step,
)
from recurra.video.clips import ClipMaker, FrameSampling, PoseFolder
from recurra.video.layouts import VIDEO_LAYOUTS, CheckedVideo, Listing, Video, check_videos
from recurra.video.reader import ReadAhead, VideoError, VideoInfo


class ViewBatch(NamedTuple):
    """Some views of some videos.

    inputs: (B, T, C, H, W) float32. targets: (B, S) int64, the label in the last segment; all `IGNORED_TARGET` for a
    video that could not be decoded. videos: (B,) int64, the place of each clip's video in `VideoData.videos(split)`.
    """

    inputs: Float[Tensor, "B T C H W"]
    targets: Int[Tensor, "B S"]
    videos: Int[Tensor, " B"]


@dataclass(frozen=True)
class _SplitClips:
    """The videos of a split and how to make clips from them."""

    what: str
    videos: Sequence[CheckedVideo]
    maker: ClipMaker
    n_segments: int
    skip: bool
    workers: int = 0
    poses: PoseFolder | None = None
    failed: set[Path] = field(default_factory=set)

    def poses_of(self, numbers: Sequence[int], epoch: int) -> Poses | None:
        """Return the poses in the training clips of these videos in an epoch; None without a folder of poses."""
        if self.poses is None:
            return None
        read = [
            self.maker.training_poses(self.videos[n], n, epoch, poses=self.poses, n_segments=self.n_segments)
            for n in numbers
        ]
        features = [feature for _, feature in read if feature is not None]
        return Poses(torch.stack([joints for joints, _ in read]), torch.stack(features) if features else None)

    def labelled(self, number: int, clip: Tensor | Exception) -> tuple[Tensor, int]:
        """Return the clip of a video with its label, or gray with `IGNORED_TARGET` if reading the clip failed."""
        video = self.videos[number]
        if not isinstance(clip, Exception):
            return clip, video.label
        if not self.skip:
            raise clip
        if video.path not in self.failed:
            self.failed.add(video.path)
            warnings.warn(
                f"a file of {self.what} could not be decoded and does not count in its batch "
                f"({len(self.failed)} so far): {clip}",
                stacklevel=4,  # past the source and its caller
            )
        return torch.zeros(self.maker.sampling.n_frames, 3, *[self.maker.image_size] * 2), IGNORED_TARGET


class ClipSource:
    """One clip of each video: a random one in training, the middle view and crop in evaluation.

    Clips come in the order of `SampleOrder`. A clip that fails to decode becomes gray, and its targets are ignored.
    """

    def __init__(self, split: _SplitClips, order: SampleOrder, *, label_segments: Literal["all", "last"]) -> None:
        self.batch_size = order.batch_size
        self._split, self._order, self._label_segments = split, order, label_segments
        self._ahead = ReadAhead(self._read, split.workers)

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the clips of a step, (B, T, C, H, W), and (B, S) targets.

        Raises VideoError if a file cannot be decoded and bad files are not skipped.
        """
        numbers, n_counted = self._order.samples(epoch, step)
        clips, labels = [], []
        for place, (number, decoded) in enumerate(zip(numbers, self._decoded(epoch, step, numbers))):
            clip, label = self._split.labelled(number, decoded)
            clips.append(clip)
            labels.append(label if place < n_counted else IGNORED_TARGET)
        targets = _segment_targets(labels, self._split.n_segments, self._label_segments)
        poses = self._split.poses_of(numbers, epoch) if self._order.training else None
        return Batch(torch.stack(clips), targets, continues=False, poses=poses)

    def _decoded(self, epoch: int, step: int, numbers: list[int]) -> list[Tensor | Exception]:
        training = self._order.training
        following = None
        if step + 1 < len(self) or training:
            then = (epoch, step + 1) if step + 1 < len(self) else (epoch + 1, 0)
            following = (then, [(number, then[0]) for number in self._order.samples(*then)[0]])
        return self._ahead.get((epoch, step), [(number, epoch) for number in numbers], following)

    def _read(self, item: tuple[int, int]) -> Tensor | Exception:
        number, epoch = item
        video, maker = self._split.videos[number], self._split.maker
        try:
            return maker.training(video, number, epoch) if self._order.training else maker.evaluation(video)[0]
        except (VideoError, OSError) as error:
            return error


class VideoViews:
    """All views of each video, in order: for each video its clips along time, for each clip its crops.

    A batch has the crops of as many clips as fit into `batch_size`, and of at least one. Clips are dealt to the ranks
    in turn, so one rank may have a batch fewer than another. The scores of a video are the mean over its views in all
    batches.

    Iterate over it, or ask for `batch(step)`, a pure function of the step and the rank.
    """

    def __init__(
        self, split: _SplitClips, *, n_views: int, n_crops: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.n_views, self.n_crops = n_views, n_crops
        self._split = split
        self._mine = range(rank, len(split.videos) * n_views, world_size)
        self._clips_at_once = max(1, batch_size // world_size // n_crops)
        self._ahead = ReadAhead(self._read, split.workers)

    def __len__(self) -> int:
        return -(-len(self._mine) // self._clips_at_once)

    def __iter__(self) -> Iterator[ViewBatch]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> ViewBatch:
        """Return the views of a step."""
        require_step(len(self), 0, step)
        items = self._items(step)
        following = (step + 1, self._items(step + 1)) if step + 1 < len(self) else None
        inputs, labels, places = [], [], []
        for item, decoded in zip(items, self._ahead.get(step, items, following)):
            number = item // self.n_views
            crops, label = self._split.labelled(number, decoded)
            inputs.append(crops.expand(self.n_crops, *crops.shape[-4:]))  # a gray clip stands for all its crops
            labels += [label] * self.n_crops
            places += [number] * self.n_crops
        targets = _segment_targets(labels, self._split.n_segments, "last")
        return ViewBatch(torch.cat(inputs), targets, torch.tensor(places))

    def _items(self, step: int) -> list[int]:
        return list(self._mine[step * self._clips_at_once : (step + 1) * self._clips_at_once])

    def _read(self, item: int) -> Tensor | Exception:
        number, view = divmod(item, self.n_views)
        video, maker = self._split.videos[number], self._split.maker
        try:
            return maker.evaluation(video, view=view, n_views=self.n_views, n_crops=self.n_crops)
        except (VideoError, OSError) as error:
            return error


def _segment_targets(
    labels: Sequence[int], n_segments: int, label_segments: Literal["all", "last"]
) -> Int[Tensor, "B S"]:
    """Give the labels to all segments or to the last one; the targets of the others are `IGNORED_TARGET`."""
    targets = torch.full((len(labels), n_segments), IGNORED_TARGET)
    asked = slice(None) if label_segments == "all" else slice(n_segments - 1, None)
    targets[:, asked] = torch.tensor(labels)[:, None]
    return targets


@dataclass(frozen=True)
class VideoConfig:
    """Classification of the videos in a folder, in clips of several segments."""

    path: str
    """Folder with the videos, or with lists of them."""
    layout: str = "csv"
    """Layout of the folder: csv (train.csv, valid.csv, test.csv), folders (SPLIT/CLASS/FILE) or smarthome."""
    protocol: str | None = None
    """Protocol of smarthome: cross-subject (the default), cross-view-1 or cross-view-2."""
    valid_share: float = 0.0
    """If the layout has no validation split: the share of the training videos of each class, drawn with the seed, to
    hold out for it. 0: no validation split."""
    n_frames: int = 8
    """Frames in a segment."""
    n_segments: int = 2
    """Segments in a clip; a clip has n_segments * n_frames frames."""
    frame_rate: float | None = None
    """Frames per second of a clip. Without it, a clip spans the whole video."""
    image_size: int = 224
    """Pixels on a side of the frames that the model sees."""
    scale_jitter: tuple[int, int] | None = None
    """Training: scale the shorter side to a number of pixels in this range. None: 8/7 to 10/7 of image_size, which for
    224 is TimeSformer's 256 to 320."""
    flip: bool = True
    """Training: mirror half of the clips left to right."""
    label_segments: Literal["all", "last"] = "all"
    """Training: the segments that have the label as their target. The default is all, because the paper also defines
    the input of the head for the first segment. In evaluation, it is always the last one."""
    batch_size: int = 8
    """Clips in a training step, over all ranks together."""
    eval_batch_size: int = 8
    """Clips in an evaluation step, over all ranks together."""
    test_views: int = 10
    """Multi-view test: clips along time of each video."""
    test_crops: int = 3
    """Multi-view test: crops of each clip."""
    on_bad_file: Literal["skip", "error"] = "skip"
    """Files that are not videos or have a single frame: skip them with one warning, or raise an error.
    With skip, a video that fails to decode later becomes a gray clip without targets."""
    workers: int = 1
    """Threads that decode clips one step ahead. 0: decode on demand."""
    keep_decoded: bool = False
    """Keep all decoded frames in memory at full size, for small data sets."""
    poses: str | None = None
    """Training of PI-ViT: folder of pose files, one for each video, in its sub-folder and with its name
    (.npz or .json; see `recurra.video.clips.PoseFolder`). Evaluation needs none."""
    cache: str | None = None
    """Folder that caches the check of all files; null: one in the user's cache folder."""
    seed: int = 0
    """Seed of the training order, of moments, scales, crops and flips, and of the held-out videos."""

    def __post_init__(self) -> None:
        choose("data.layout", dict.fromkeys(VIDEO_LAYOUTS), self.layout)
        require(0 <= self.valid_share < 1, "data.valid_share", self.valid_share, "a share in [0, 1)")
        require_literal_fields(self, "data")
        counts = ("n_frames", "n_segments", "image_size", "batch_size", "eval_batch_size", "test_views", "test_crops")
        require_whole_number(1, **fields_of(self, "data", *counts))
        require_whole_number(0, **fields_of(self, "data", "workers", "seed"))
        require_positive(**fields_of(self, "data", "frame_rate"))
        low, high = self.short_sides
        require_whole_number(self.image_size, **{"data.scale_jitter[0]": low})
        require_whole_number(low, **{"data.scale_jitter[1]": high})

    @property
    def short_sides(self) -> tuple[int, int]:
        """The range of the shorter side in training, in pixels."""
        if self.scale_jitter is None:
            return round(self.image_size * 8 / 7), round(self.image_size * 10 / 7)
        low, high = self.scale_jitter
        return low, high

    @property
    def sampling(self) -> FrameSampling:
        """The moments that a clip shows."""
        return FrameSampling(self.n_segments * self.n_frames, self.frame_rate)

    def clip_rate(self, video: VideoInfo) -> tuple[float, int | None]:
        """Return the frames per second at which a clip shows a video, and their number if it spans the video.

        Durations are rounded in some files: without the number, one frame more might fit, and the last one would make a
        segment of its own.
        """
        sampling = self.sampling
        if sampling.rate:
            return sampling.rate, None
        return sampling.n_frames / sampling.seconds(video), sampling.n_frames

    def build(self, *, rank: int = 0, world_size: int = 1) -> "VideoData":
        """Find the videos. The files of a split are checked when it is first used.

        Raises ValueError if the folder does not have the `layout`; FileNotFoundError for a folder or listed files that
        do not exist.
        """
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            got = f"{self.path}, {'a file' if folder.exists() else 'which does not exist'}"
            raise FileNotFoundError(sentence("data.path", got, "a folder"))
        listing = VIDEO_LAYOUTS[self.layout](folder, self.protocol)
        return VideoData(self, listing, folder=folder, rank=rank, world_size=world_size)


class VideoData:
    """The videos of a `VideoConfig`.

    class_names: the name of each label. output_size: classes. n_frames: frames in a segment. n_segments: segments in a
    clip. image_size: pixels on a side.
    """

    def __init__(
        self, config: VideoConfig, listing: Listing, *, folder: Path, rank: int = 0, world_size: int = 1
    ) -> None:
        require_rank(rank, world_size, config.batch_size)
        self.config = config
        self.class_names = listing.class_names
        self.output_size = len(listing.class_names)
        self.n_frames, self.n_segments, self.image_size = config.n_frames, config.n_segments, config.image_size
        self.rank, self.world_size = rank, world_size
        self._listed: Mapping[Split, Sequence[Video]] = listing.videos
        if "valid" not in self._listed and config.valid_share:
            self._listed = _hold_out(self._listed, config.valid_share, config.seed)
        self._folder = folder
        self._store = Cache(folder, config.cache)
        self.cache_folder = self._store.folder
        self._checked: dict[Split, list[CheckedVideo]] = {}
        self._maker = ClipMaker(
            config.sampling,
            image_size=config.image_size,
            scale_jitter=config.short_sides,
            flip=config.flip,
            seed=config.seed,
            kept={} if config.keep_decoded else None,
        )
        for note in listing.notes:
            warnings.warn(f"skipping in {folder}: {note}", stacklevel=3)

    def videos(self, split: Split) -> list[CheckedVideo]:
        """Return the usable videos of a split, in the order of its list."""
        require_literal(Split, split=split)
        if split not in self._checked:
            if not self._listed.get(split):
                hint = "set data.valid_share to hold out some training videos" if split == "valid" else ""
                listed = ", ".join(self._listed) or "none"
                raise ValueError(sentence("split", repr(split), f"a split of {self.config.path} ({listed})", hint))
            self._checked[split] = check_videos(
                self._in_words(split),
                self._listed[split],
                skip=self.config.on_bad_file == "skip",
                workers=self.config.workers,
                store=self._store,
            )
        return self._checked[split]

    def fingerprint(self) -> str:
        """Digest the names, labels and sizes of the videos for training and validation, wherever their folder lies."""
        listed = [
            (os.path.relpath(video.path, self._folder), video.label, video.path.stat().st_size)
            for split in ("train", "valid")
            for video in self._listed.get(split, ())
        ]
        return json_sha256(listed)

    def source(self, split: Split) -> ClipSource:
        """Return the batches of a split, one clip per video: random in training, otherwise the middle view and crop."""
        config, training = self.config, split == "train"
        order = SampleOrder(
            len(self.videos(split)),
            batch_size=config.batch_size if training else config.eval_batch_size,
            seed=config.seed if training else None,
            rank=self.rank,
            world_size=self.world_size,
        )
        poses = None
        if training and config.poses is not None:
            poses = PoseFolder(Path(config.poses).expanduser(), self._folder, self.videos(split))
        return ClipSource(
            self._clips(split, poses), order, label_segments=config.label_segments if training else "last"
        )

    def views(self, split: Split) -> VideoViews:
        """Return all views of each video of a split: `test_views` clips along time, `test_crops` crops of each."""
        config = self.config
        return VideoViews(
            self._clips(split),
            n_views=config.test_views,
            n_crops=config.test_crops,
            batch_size=config.eval_batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _clips(self, split: Split, poses: PoseFolder | None = None) -> _SplitClips:
        skip = self.config.on_bad_file == "skip"
        return _SplitClips(
            self._in_words(split), self.videos(split), self._maker, self.n_segments, skip, self.config.workers, poses
        )

    def _in_words(self, split: Split) -> str:
        return f"the {split} split of {self.config.path}"


def _hold_out(listed: Mapping[Split, Sequence[Video]], share: float, seed: int) -> dict[Split, Sequence[Video]]:
    """Move a share of the training videos of each class to a validation split."""
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
