"""Batches of clips: one clip of each video, or all views of each video."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.data.order import require_step
from recurra.data.rows import RowOrder
from recurra.data.video.ahead import ReadAhead
from recurra.data.video.checked import CheckedVideo
from recurra.data.video.clips import ClipMaker, gray_clip
from recurra.data.video.reader import VideoError


class ViewBatch(NamedTuple):
    """Some views of some videos.

    inputs: (B, T, C, H, W) float32. targets: (B, S) int64, the label in the last segment; all `IGNORED_TARGET` where
    a video could not be decoded. videos: (B,) int64, the place of each row's video in `VideoData.videos(split)`.
    """

    inputs: Float[Tensor, "B T C H W"]
    targets: Int[Tensor, "B S"]
    videos: Int[Tensor, " B"]


class BadFiles:
    """Videos that failed while they were decoded: each is told once, with how many there are by then.

    what: the split in words. skip: warn; otherwise raise.
    """

    def __init__(self, what: str, *, skip: bool) -> None:
        self.what, self.skip = what, skip
        self.reasons: dict[str, str] = {}

    def add(self, video: CheckedVideo, error: Exception) -> None:
        """Note that a video failed. Raises its error unless bad files are skipped."""
        if not self.skip:
            raise error
        if str(video.path) in self.reasons:
            return
        self.reasons[str(video.path)] = str(error)
        warnings.warn(
            f"a file of {self.what} could not be decoded and is left out of its batch "
            f"({len(self.reasons)} so far): {error}",
            stacklevel=4,
        )


class ClipSource:
    """One clip of each video: at random in training, the middle view and crop in evaluation.

    Rows are ordered as `RowOrder` says. The row of a video that fails while it is decoded is gray and all its
    targets are ignored. With `workers`, the clips of the next step are decoded in threads ahead of time.

    videos: what there is. clips: makes a clip. n_segments: segments of a clip. label_segments: which of them are
    asked for the label. order: the rows of each step. bad_files: where failures are told.
    """

    def __init__(
        self,
        videos: Sequence[CheckedVideo],
        clips: ClipMaker,
        order: RowOrder,
        *,
        n_segments: int,
        label_segments: Literal["all", "last"],
        bad_files: BadFiles,
        workers: int = 0,
    ) -> None:
        self.batch_size = order.rows_here
        self._videos, self._clips, self._order = videos, clips, order
        self._n_segments, self._label_segments = n_segments, label_segments
        self._bad_files = bad_files
        self._ahead = ReadAhead(self._read, workers)

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, epoch: int, step: int) -> Batch:
        """The clips of a step: (B, T, C, H, W) and (B, S) targets. Raises as `BatchSource.batch` says.

        Raises VideoError where a file cannot be decoded and bad files are not to be skipped.
        """
        rows, n_counted = self._order.rows(epoch, step)
        clips, labels = [], []
        for place, (number, clip) in enumerate(zip(rows, self._decoded(epoch, step, rows))):
            video = self._videos[number]
            counted = place < n_counted
            if isinstance(clip, Exception):
                self._bad_files.add(video, clip)
                clip, counted = gray_clip(self._clips.sampling.n_frames, self._clips.image_size), False
            clips.append(clip)
            labels.append(video.label if counted else IGNORED_TARGET)
        targets = segment_targets(labels, self._n_segments, self._label_segments)
        return Batch(torch.stack(clips), targets, continues=False)

    def _decoded(self, epoch: int, step: int, rows: list[int]) -> list[Tensor | Exception]:
        training = self._order.training
        following = None
        if step + 1 < len(self) or training:
            then = (epoch, step + 1) if step + 1 < len(self) else (epoch + 1, 0)
            following = (then, [(number, then[0]) for number in self._order.rows(*then)[0]])
        return self._ahead.get((epoch, step), [(number, epoch) for number in rows], following)

    def _read(self, item: tuple[int, int]) -> Tensor | Exception:
        number, epoch = item
        try:
            if self._order.training:
                return self._clips.training(self._videos[number], number, epoch)
            return self._clips.evaluation(self._videos[number])[0]
        except (VideoError, OSError) as error:
            return error


class VideoViews:
    """Every view of every video, in order: for each video its clips along time, for each clip its crops.

    A batch holds the crops of as many clips as fit into `batch_size` rows, at least of one. The clips are dealt to
    the ranks in turn; a rank may have one batch fewer than another. The scores of a video are the mean over its rows
    in all batches.

    Iterate over it, or ask for `batch(step)`, a pure function of the step and the rank.
    """

    def __init__(
        self,
        videos: Sequence[CheckedVideo],
        clips: ClipMaker,
        *,
        n_views: int,
        n_crops: int,
        n_segments: int,
        batch_size: int,
        bad_files: BadFiles,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.n_views, self.n_crops = n_views, n_crops
        self.labels = torch.tensor([video.label for video in videos])
        self._videos, self._clips, self._n_segments = videos, clips, n_segments
        self._mine = range(rank, len(videos) * n_views, world_size)
        self._clips_at_once = max(1, batch_size // world_size // n_crops)
        self._bad_files = bad_files
        self._ahead = ReadAhead(self._read, workers)

    def __len__(self) -> int:
        return -(-len(self._mine) // self._clips_at_once)

    def __iter__(self) -> Iterator[ViewBatch]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> ViewBatch:
        """The views of a step. Raises IndexError outside 0..len-1; VideoError as `ClipSource.batch` does."""
        require_step(len(self), 0, step)
        items = self._items(step)
        following = (step + 1, self._items(step + 1)) if step + 1 < len(self) else None
        inputs, labels, places = [], [], []
        for item, crops in zip(items, self._ahead.get(step, items, following)):
            number = item // self.n_views
            label = self._videos[number].label
            if isinstance(crops, Exception):
                self._bad_files.add(self._videos[number], crops)
                gray = gray_clip(self._clips.sampling.n_frames, self._clips.image_size)
                crops, label = gray.expand(self.n_crops, *gray.shape), IGNORED_TARGET
            inputs.append(crops)
            labels += [label] * self.n_crops
            places += [number] * self.n_crops
        return ViewBatch(torch.cat(inputs), segment_targets(labels, self._n_segments, "last"), torch.tensor(places))

    def _items(self, step: int) -> list[int]:
        return list(self._mine[step * self._clips_at_once : (step + 1) * self._clips_at_once])

    def _read(self, item: int) -> Tensor | Exception:
        number, view = divmod(item, self.n_views)
        try:
            return self._clips.evaluation(self._videos[number], view=view, n_views=self.n_views, n_crops=self.n_crops)
        except (VideoError, OSError) as error:
            return error


def segment_targets(
    labels: Sequence[int], n_segments: int, label_segments: Literal["all", "last"]
) -> Int[Tensor, "B S"]:
    """The labels, where the segments are asked for them; `IGNORED_TARGET` elsewhere."""
    targets = torch.full((len(labels), n_segments), IGNORED_TARGET)
    asked = slice(None) if label_segments == "all" else slice(n_segments - 1, None)
    targets[:, asked] = torch.tensor(labels)[:, None]
    return targets
