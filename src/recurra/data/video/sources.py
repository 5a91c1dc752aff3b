"""Batches of clips: one clip of each video, or all views of each video."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.data.order import require_step
from recurra.data.sample_order import SampleOrder
from recurra.data.video.ahead import ReadAhead
from recurra.data.video.checked import CheckedVideo
from recurra.data.video.clips import ClipMaker, gray_clip
from recurra.data.video.poses import PoseFolder
from recurra.data.video.reader import VideoError
from recurra.layers.poses import Poses


class ViewBatch(NamedTuple):
    """Some views of some videos.

    inputs: (B, T, C, H, W) float32. targets: (B, S) int64, the label in the last segment; all `IGNORED_TARGET` for a
    video that could not be decoded. videos: (B,) int64, the place of each clip's video in `VideoData.videos(split)`.
    """

    inputs: Float[Tensor, "B T C H W"]
    targets: Int[Tensor, "B S"]
    videos: Int[Tensor, " B"]


class BadFiles:
    """Collects videos that fail to decode and reports each one once, with the number of failures so far.

    what: the split, in words. skip: warn about a failure; otherwise raise its error.
    """

    def __init__(self, what: str, *, skip: bool) -> None:
        self.what, self.skip = what, skip
        self.reasons: dict[str, str] = {}

    def add(self, video: CheckedVideo, error: Exception) -> None:
        """Record that a video failed. Raises its error unless bad files are skipped."""
        if not self.skip:
            raise error
        if str(video.path) in self.reasons:
            return
        self.reasons[str(video.path)] = str(error)
        warnings.warn(
            f"a file of {self.what} could not be decoded and does not count in its batch "
            f"({len(self.reasons)} so far): {error}",
            stacklevel=5,  # past the source and its caller
        )


@dataclass(frozen=True)
class SplitClips:
    """The videos of a split and how to make clips from them.

    videos: the videos. maker: makes their clips. n_segments: segments per clip. bad_files: collects failures. workers:
    threads that decode the clips of the next step ahead of time; 0 for none. poses: of the videos, for training.
    """

    videos: Sequence[CheckedVideo]
    maker: ClipMaker
    n_segments: int
    bad_files: BadFiles
    workers: int = 0
    poses: PoseFolder | None = None

    def poses_of(self, numbers: Sequence[int], epoch: int) -> Poses | None:
        """Return the poses in the training clips of these videos in an epoch; None without a folder of poses."""
        if self.poses is None:
            return None
        options = {"poses": self.poses, "n_segments": self.n_segments}
        read = [self.maker.training_poses(self.videos[n], n, epoch, **options) for n in numbers]  # type: ignore[arg-type]
        features = [feature for _, feature in read if feature is not None]
        return Poses(torch.stack([joints for joints, _ in read]), torch.stack(features) if features else None)

    def labelled(self, number: int, clip: Tensor | Exception) -> tuple[Tensor, int]:
        """Return the clip of a video with its label, or gray with `IGNORED_TARGET` if reading the clip failed.

        Raises that failure unless bad files are skipped.
        """
        video = self.videos[number]
        if not isinstance(clip, Exception):
            return clip, video.label
        self.bad_files.add(video, clip)
        return gray_clip(self.maker.sampling.n_frames, self.maker.image_size), IGNORED_TARGET


class ClipSource:
    """One clip of each video: a random one in training, the middle view and crop in evaluation.

    Clips come in the order of `SampleOrder`. A clip that fails to decode becomes gray, and its targets are ignored.

    split: the videos and their clips. order: which videos a step has. label_segments: which segments have the label as
    their target.
    """

    def __init__(self, split: SplitClips, order: SampleOrder, *, label_segments: Literal["all", "last"]) -> None:
        self.batch_size = order.batch_size
        self._split, self._order, self._label_segments = split, order, label_segments
        self._ahead = ReadAhead(self._read, split.workers)

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the clips of a step, (B, T, C, H, W), and (B, S) targets. Raises what `BatchSource.batch` raises.

        Raises VideoError if a file cannot be decoded and bad files are not skipped.
        """
        numbers, n_counted = self._order.samples(epoch, step)
        clips, labels = [], []
        for place, (number, decoded) in enumerate(zip(numbers, self._decoded(epoch, step, numbers))):
            clip, label = self._split.labelled(number, decoded)
            clips.append(clip)
            labels.append(label if place < n_counted else IGNORED_TARGET)
        targets = segment_targets(labels, self._split.n_segments, self._label_segments)
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

    split: the videos and their clips. n_views: clips along time of each video. n_crops: crops of each clip. batch_size:
    crops per step over all ranks together.
    """

    def __init__(
        self,
        split: SplitClips,
        *,
        n_views: int,
        n_crops: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.n_views, self.n_crops = n_views, n_crops
        self.labels = torch.tensor([video.label for video in split.videos])
        self._split = split
        self._mine = range(rank, len(split.videos) * n_views, world_size)
        self._clips_at_once = max(1, batch_size // world_size // n_crops)
        self._ahead = ReadAhead(self._read, split.workers)

    def __len__(self) -> int:
        return -(-len(self._mine) // self._clips_at_once)

    def __iter__(self) -> Iterator[ViewBatch]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> ViewBatch:
        """Return the views of a step. Raises IndexError outside 0..len-1, and VideoError as `ClipSource.batch` does."""
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
        targets = segment_targets(labels, self._split.n_segments, "last")
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


def segment_targets(
    labels: Sequence[int], n_segments: int, label_segments: Literal["all", "last"]
) -> Int[Tensor, "B S"]:
    """Give the labels to all segments or to the last one; the targets of the others are `IGNORED_TARGET`."""
    targets = torch.full((len(labels), n_segments), IGNORED_TARGET)
    asked = slice(None) if label_segments == "all" else slice(n_segments - 1, None)
    targets[:, asked] = torch.tensor(labels)[:, None]
    return targets
