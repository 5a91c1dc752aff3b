"""Clips of one video: which moments, frames and view they show."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from recurra.data.order import VIDEO_CLIPS, random_generator
from recurra.data.video.checked import CheckedVideo
from recurra.data.video.poses import PoseFolder
from recurra.data.video.reader import VideoFile, VideoFrames
from recurra.data.video.sampling import FrameSampling
from recurra.data.video.transforms import draw_view, evaluation_crops, training_clip


@dataclass(frozen=True)
class ClipMaker:
    """Makes clips as a configuration asks.

    sampling: the moments of a clip. image_size: pixels on a side. scale_jitter, flip: see `training_clip`. seed: of all
    random choices. kept: the frames of the videos read so far, by path; None keeps none.
    """

    sampling: FrameSampling
    image_size: int
    scale_jitter: tuple[int, int]
    flip: bool
    seed: int
    kept: dict[str, VideoFrames] | None = None

    def training(self, video: CheckedVideo, number: int, epoch: int) -> Float[Tensor, "T C S S"]:
        """Make the clip of a video in an epoch: a pure function of (seed, epoch, number of the video).

        Raises VideoError if the file cannot be read.
        """
        random = random_generator(self.seed, VIDEO_CLIPS, epoch, number)
        frames = self._frames(video, self.sampling.random(video.info, random))
        return training_clip(frames, random, image_size=self.image_size, scale_jitter=self.scale_jitter, flip=self.flip)

    def training_poses(
        self, video: CheckedVideo, number: int, epoch: int, *, poses: PoseFolder, n_segments: int
    ) -> tuple[Float[Tensor, "T J 2"], Float[Tensor, "n_segments F"] | None]:
        """Return the joints in pixels of the clip that `training` makes, and the features of its segments.

        It draws what `training` draws. Mirrored joints keep their numbers: a left hand stays the left hand.

        Raises ValueError if the pose file cannot be read.
        """
        random, info = random_generator(self.seed, VIDEO_CLIPS, epoch, number), video.info
        joints, features = poses.at(video, self.sampling.random(info, random), n_segments)
        jitter = {"scale_jitter": self.scale_jitter, "flip": self.flip}
        view = draw_view(random, info.height, info.width, image_size=self.image_size, **jitter)  # type: ignore[arg-type]
        return view.places(joints, info.height, info.width), features

    def evaluation(
        self, video: CheckedVideo, *, view: int = 0, n_views: int = 1, n_crops: int = 1
    ) -> Float[Tensor, "n_crops T C S S"]:
        """Make all crops of one of the fixed views of a video. Raises VideoError if the file cannot be read."""
        frames = self._frames(video, self.sampling.view(video.info, view, n_views))
        return evaluation_crops(frames, image_size=self.image_size, n_crops=n_crops)

    def _frames(self, video: CheckedVideo, times: np.ndarray) -> UInt8[Tensor, "T 3 H W"]:
        if self.kept is None:
            with VideoFile(video.path) as file:
                return file.frames_at(times)
        key = str(video.path)
        if key not in self.kept:
            with VideoFile(video.path) as file:
                self.kept[key] = file.decode()
        return self.kept[key].at(times)


def gray_clip(n_frames: int, image_size: int) -> Float[Tensor, "T 3 S S"]:
    """Make the clip of a video that could not be read: zeros, which is middle gray."""
    return torch.zeros(n_frames, 3, image_size, image_size)
