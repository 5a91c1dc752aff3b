"""Clips of a video: the moments that they show, their transforms, and the poses at these moments."""

import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from recurra._files.reading import read_json
from recurra.checks import require, sentence
from recurra.data.batches import VIDEO_CLIPS, random_generator
from recurra.video.layouts import CheckedVideo
from recurra.video.reader import VideoFile, VideoFrames, VideoInfo


@dataclass(frozen=True)
class FrameSampling:
    """Places `n_frames` moments evenly in a video, each in the middle of its share of the clip.

    n_frames: frames of a clip, all segments together. rate: frames per second of the clip; None: the clip spans the
    whole video.

    A clip that would be longer than the video spans the whole video with its frames closer together; frames repeat only
    if the video has fewer. (TimeSformer repeats the last frame instead, so the second segment of such a clip would have
    nothing to see.)
    """

    n_frames: int
    rate: float | None = None

    def seconds(self, video: VideoInfo) -> float:
        """Compute the length of a clip of `video`, in seconds."""
        if self.rate is not None:
            return min(self.n_frames / self.rate, video.duration)
        return video.duration

    def random(self, video: VideoInfo, random: np.random.Generator) -> np.ndarray:
        """Draw the times of a training clip: (n_frames,) seconds, ascending.

        With a rate, the start of the clip is uniform. For a clip of the whole video, each time is uniform
        within its share.
        """
        seconds = self.seconds(video)
        if self.rate is None:
            return self._places(0.0, seconds, random.random(self.n_frames))
        return self._places(random.random() * (video.duration - seconds), seconds, 0.5)

    def view(self, video: VideoInfo, view: int = 0, n_views: int = 1) -> np.ndarray:
        """Compute the times of one of `n_views` fixed evaluation clips: (n_frames,) seconds, ascending.

        With a rate, clips start at even distances; the first starts with the video and the last ends with
        it, and a single clip lies in the middle. Clips of the whole video divide the shares evenly.
        """
        seconds = self.seconds(video)
        if self.rate is None:
            return self._places(0.0, seconds, (view + 0.5) / n_views)
        where = view / (n_views - 1) if n_views > 1 else 0.5
        return self._places(where * (video.duration - seconds), seconds, 0.5)

    def _places(self, start: float, seconds: float, within: float | np.ndarray) -> np.ndarray:
        return start + (np.arange(self.n_frames) + within) * (seconds / self.n_frames)


_MEAN, _STD = 0.45, 0.225  # of each channel of a picture in [0, 1], as in TimeSformer


def normalise(frames: Tensor) -> Float[Tensor, "*shape"]:
    """Turn pictures of whole numbers 0..255 into float32: subtract 0.45 and divide by 0.225."""
    return (frames.float() / 255 - _MEAN) / _STD


def resize_short_side(frames: Float[Tensor, "T C H W"], short_side: int) -> Float[Tensor, "T C h w"]:
    """Scale pictures bilinearly, so that the shorter side has `short_side` pixels; the aspect ratio stays the same."""
    size = _scaled_size(frames.shape[-2], frames.shape[-1], short_side)
    if size == tuple(frames.shape[-2:]):
        return frames
    return interpolate(frames, size=size, mode="bilinear", align_corners=False)


def _scaled_size(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Return the height and width of a picture whose shorter side is scaled to `short_side` pixels."""
    factor = short_side / min(height, width)
    return max(short_side, round(height * factor)), max(short_side, round(width * factor))


class _TrainingView(NamedTuple):
    """What a training clip shows of its frames: a square of the scaled pictures, perhaps mirrored."""

    size: tuple[int, int]
    top: int
    left: int
    image_size: int
    mirrored: bool

    def places(self, places: Float[Tensor, "*shape 2"], height: int, width: int) -> Float[Tensor, "*shape 2"]:
        """Return where places (x, y) in pixels of pictures of this height and width are in the clip."""
        scale = places.new_tensor((self.size[1] / width, self.size[0] / height))
        moved = places * scale - places.new_tensor((self.left, self.top))
        return torch.stack([self.image_size - moved[..., 0], moved[..., 1]], -1) if self.mirrored else moved


def _draw_view(
    random: np.random.Generator, height: int, width: int, *, image_size: int, scale_jitter: tuple[int, int], flip: bool
) -> _TrainingView:
    """Draw the view of a training clip of pictures of this height and width; see `training_clip`."""
    short_side = int(random.integers(scale_jitter[0], scale_jitter[1] + 1))
    places, mirrored = random.random(2), random.random() < 0.5
    size = _scaled_size(height, width, short_side)
    top, left = (int(place * (side - image_size + 1)) for place, side in zip(places, size))
    return _TrainingView(size, top, left, image_size, bool(flip and mirrored))


def training_clip(
    frames: UInt8[Tensor, "T C H W"],
    random: np.random.Generator,
    *,
    image_size: int,
    scale_jitter: tuple[int, int],
    flip: bool,
) -> Float[Tensor, "T C S S"]:
    """Make a random normalised view of a clip: TimeSformer's training transform.

    Scales the shorter side to a number of pixels drawn uniformly from `scale_jitter` (both ends included), cuts a
    square of `image_size` at a random place, and with `flip` mirrors half of the clips left to right.
    """
    height, width = frames.shape[-2:]
    view = _draw_view(random, height, width, image_size=image_size, scale_jitter=scale_jitter, flip=flip)
    scaled = resize_short_side(frames.float(), min(view.size))
    cut = scaled[..., view.top : view.top + image_size, view.left : view.left + image_size]
    return normalise(cut.flip(-1) if view.mirrored else cut).contiguous()


def evaluation_crops(
    frames: UInt8[Tensor, "T C H W"], *, image_size: int, n_crops: int = 1
) -> Float[Tensor, "n_crops T C S S"]:
    """Make fixed normalised views of a clip: scale the shorter side to `image_size`, then cut squares along the longer.

    n_crops: 1 cuts the middle; more are spaced evenly from the left (or top) end to the right (or bottom).
    """
    scaled = resize_short_side(frames.float(), image_size)
    space = [side - image_size for side in scaled.shape[-2:]]
    crops = []
    for crop in range(n_crops):
        where = crop / (n_crops - 1) if n_crops > 1 else 0.5
        top, left = (round(where * side) for side in space)
        crops.append(scaled[..., top : top + image_size, left : left + image_size])
    return normalise(torch.stack(crops))


_SUFFIXES = (".npz", ".json")
"""Suffixes of pose files, in the order in which they are looked for."""
_MOST_BYTES = 256 * 2**20
_SAME_TIME = 1e-6  # seconds, as between frames of a video


class PoseFolder:
    """The poses of videos, one file each: NAME.npz or NAME.json for the video NAME.SUFFIX, in the same sub-folder.

    A file has `joints`, (frames, joints, 2): (x, y) in pixels of the video's picture as shown, from its upper left
    corner; NaN, in JSON null, where a joint was not found. It may have `features` of a skeleton model: (channels,) for
    the whole video, or (rows, channels) for equal shares of it. Rows of both are spread evenly over the video's time,
    so they may be fewer than its frames; a variable frame rate is not followed.

    A video without a file has NaN everywhere: it teaches its class alone.

    Args:
        folder: of the pose files.
        videos: the folder of the videos. The files of videos outside of it are looked for by name.
        listed: the videos, of which the first with a file says how many joints and features all others have.
    """

    def __init__(self, folder: Path, videos: Path, listed: Sequence[CheckedVideo]) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(sentence("data.poses", f"{folder}, which is no folder", "a folder of pose files"))
        self.folder, self._videos = folder, videos
        files = [self.file(video.path) for video in listed]
        found = [file for file in files if file is not None]
        if not found:
            got = f"{folder}, which has no file for any of {len(files)} videos"
            raise ValueError(sentence("data.poses", got, "files named like the videos, .npz or .json"))
        if missing := len(files) - len(found):
            warnings.warn(f"{missing} of {len(files)} videos have no poses in {folder}", stacklevel=3)
        joints, features = read_poses(found[0])
        self.n_joints = joints.shape[1]
        self.d_features = None if features is None else features.shape[1]

    def file(self, video: Path) -> Path | None:
        """Return the pose file of a video, or None."""
        place = os.path.relpath(video, self._videos)  # without links, as poses are named like what the list names
        name = Path(video.name) if place.startswith(os.pardir) else Path(place)
        files = (self.folder / name.with_suffix(suffix) for suffix in _SUFFIXES)
        return next((file for file in files if file.is_file()), None)

    def at(
        self, video: CheckedVideo, times: np.ndarray, n_segments: int
    ) -> tuple[Float[Tensor, "T J 2"], Float[Tensor, "S F"] | None]:
        """Return the joints at the times of a clip, in pixels of the video, and the mean features of each segment."""
        file = self.file(video.path)
        if file is None:
            nothing = None if self.d_features is None else torch.full((n_segments, self.d_features), math.nan)
            return torch.full((len(times), self.n_joints, 2), math.nan), nothing
        joints, features = read_poses(file)
        got = (joints.shape[1], None if features is None else features.shape[1])
        if got != (self.n_joints, self.d_features):
            expected = f"as in the other files ({self.n_joints} and {self.d_features})"
            raise ValueError(sentence(str(file), f"a file of {got[0]} joints and {got[1]} features", expected))
        where = (times + _SAME_TIME) / video.info.duration
        chosen = torch.from_numpy(joints[_rows(where, len(joints))])
        if features is None:
            return chosen, None
        by_segment = features[_rows(where, len(features))].reshape(n_segments, -1, features.shape[1])
        return chosen, torch.from_numpy(by_segment.mean(1))


def read_poses(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a pose file: joints (frames, joints, 2), and features (rows, channels) if there are any, in float32."""
    content = _read_npz(file) if file.suffix == ".npz" else read_json(file)
    require("joints" in content, str(file), "a file without joints", "one with an array `joints`")
    joints = _array(content["joints"], f"joints of {file}")
    if joints.ndim != 3 or joints.shape[2] != 2 or 0 in joints.shape:
        raise ValueError(sentence(f"joints of {file}", f"of shape {joints.shape}", "(frames, joints, 2)"))
    if content.get("features") is None:
        return joints, None
    features = _array(content["features"], f"features of {file}")
    if features.ndim not in (1, 2) or 0 in features.shape:
        raise ValueError(
            sentence(f"features of {file}", f"of shape {features.shape}", "(channels,) or (rows, channels)")
        )
    return joints, np.atleast_2d(features)


def _read_npz(file: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            n_bytes = sum(entry.file_size for entry in archive.infolist())
        if n_bytes <= _MOST_BYTES:
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in ("joints", "features") if name in arrays}
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(sentence(str(file), f"damaged ({error})", "an .npz file of numbers")) from error
    raise ValueError(sentence(str(file), f"{n_bytes:,} bytes", f"at most {_MOST_BYTES:,}"))


def _array(value: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(value, dtype=np.float32)  # null becomes NaN
    except (TypeError, ValueError) as error:
        raise ValueError(sentence(name, "not an array of numbers", "one")) from error


def _rows(where: np.ndarray, n: int) -> np.ndarray:
    return np.clip(np.floor(where * n).astype(int), 0, n - 1)


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
        """Make the clip of a video in an epoch: a pure function of (seed, epoch, number of the video)."""
        random = random_generator(self.seed, VIDEO_CLIPS, epoch, number)
        frames = self._frames(video, self.sampling.random(video.info, random))
        return training_clip(frames, random, image_size=self.image_size, scale_jitter=self.scale_jitter, flip=self.flip)

    def training_poses(
        self, video: CheckedVideo, number: int, epoch: int, *, poses: PoseFolder, n_segments: int
    ) -> tuple[Float[Tensor, "T J 2"], Float[Tensor, "n_segments F"] | None]:
        """Return the joints in pixels of the clip that `training` makes, and the features of its segments."""
        random, info = random_generator(self.seed, VIDEO_CLIPS, epoch, number), video.info
        joints, features = poses.at(video, self.sampling.random(info, random), n_segments)
        jitter = {"scale_jitter": self.scale_jitter, "flip": self.flip}
        view = _draw_view(random, info.height, info.width, image_size=self.image_size, **jitter)  # type: ignore[arg-type]
        return view.places(joints, info.height, info.width), features

    def evaluation(
        self, video: CheckedVideo, *, view: int = 0, n_views: int = 1, n_crops: int = 1
    ) -> Float[Tensor, "n_crops T C S S"]:
        """Make all crops of one of the fixed views of a video."""
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
