"""Which moments of a video a clip shows."""

from dataclasses import dataclass

import numpy as np

from recurra.data.video.reader import VideoInfo


@dataclass(frozen=True)
class FrameSampling:
    """Places `n_frames` moments in a video, evenly in time; each is the middle of its share of the clip.

    n_frames: frames of a clip, all segments together.
    rate: frames per second of the clip. stride: the clip takes every stride-th frame of the video. At most one of
    them; with neither the clip spans the whole video.

    A clip that would be longer than the video spans the whole video, its frames closer together; frames repeat only
    where the video has fewer of them. (TimeSformer repeats the last frame instead, which leaves a second segment
    of such a clip without anything to see.)
    """

    n_frames: int
    rate: float | None = None
    stride: int | None = None

    def seconds(self, video: VideoInfo) -> float:
        """How long a clip of `video` is, in seconds."""
        if self.rate is not None:
            return min(self.n_frames / self.rate, video.duration)
        if self.stride is not None:
            return min(self.n_frames * self.stride / video.fps, video.duration)
        return video.duration

    def random(self, video: VideoInfo, random: np.random.Generator) -> np.ndarray:
        """The times of a clip for training: (n_frames,) seconds, ascending.

        With a rate or a stride the clip starts at a random time, uniformly. Over the whole video each time is
        drawn uniformly within its share.
        """
        seconds = self.seconds(video)
        if self._spans_the_video:
            return self._places(0.0, seconds, random.random(self.n_frames))
        return self._places(random.random() * (video.duration - seconds), seconds, 0.5)

    def view(self, video: VideoInfo, view: int = 0, n_views: int = 1) -> np.ndarray:
        """The times of one of `n_views` fixed clips for evaluation: (n_frames,) seconds, ascending.

        With a rate or a stride the clips start at even distances, the first at the start of the video and the last
        ending with it; a single one lies in the middle. Over the whole video they divide the shares evenly.
        """
        seconds = self.seconds(video)
        if self._spans_the_video:
            return self._places(0.0, seconds, (view + 0.5) / n_views)
        where = view / (n_views - 1) if n_views > 1 else 0.5
        return self._places(where * (video.duration - seconds), seconds, 0.5)

    @property
    def _spans_the_video(self) -> bool:
        return self.rate is None and self.stride is None

    def _places(self, start: float, seconds: float, within: float | np.ndarray) -> np.ndarray:
        return start + (np.arange(self.n_frames) + within) * (seconds / self.n_frames)
