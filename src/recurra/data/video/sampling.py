"""The moments of a video that a clip shows."""

from dataclasses import dataclass

import numpy as np

from recurra.data.video.reader import VideoInfo


@dataclass(frozen=True)
class FrameSampling:
    """Places `n_frames` moments evenly in a video, each in the middle of its share of the clip.

    n_frames: frames of a clip, all segments together. rate: frames per second of the clip. stride: the clip takes every
    stride-th frame of the video. Set at most one of the two; with neither, the clip spans the whole video.

    A clip that would be longer than the video spans the whole video with its frames closer together; frames repeat only
    if the video has fewer. (TimeSformer repeats the last frame instead, so the second segment of such a clip would have
    nothing to see.)
    """

    n_frames: int
    rate: float | None = None
    stride: int | None = None

    def seconds(self, video: VideoInfo) -> float:
        """Compute the length of a clip of `video`, in seconds."""
        if self.rate is not None:
            return min(self.n_frames / self.rate, video.duration)
        if self.stride is not None:
            return min(self.n_frames * self.stride / video.fps, video.duration)
        return video.duration

    def random(self, video: VideoInfo, random: np.random.Generator) -> np.ndarray:
        """Draw the times of a training clip: (n_frames,) seconds, ascending.

        With a rate or a stride, the start of the clip is uniform. For a clip of the whole video, each time is uniform
        within its share.
        """
        seconds = self.seconds(video)
        if self._spans_the_video:
            return self._places(0.0, seconds, random.random(self.n_frames))
        return self._places(random.random() * (video.duration - seconds), seconds, 0.5)

    def view(self, video: VideoInfo, view: int = 0, n_views: int = 1) -> np.ndarray:
        """Compute the times of one of `n_views` fixed evaluation clips: (n_frames,) seconds, ascending.

        With a rate or a stride, clips start at even distances; the first starts with the video and the last ends with
        it, and a single clip lies in the middle. Clips of the whole video divide the shares evenly.
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
