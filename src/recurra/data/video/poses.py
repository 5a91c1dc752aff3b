"""Poses beside videos: a file for each video, and what it says of the moments of a clip."""

import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import require, sentence
from recurra.data.video.checked import CheckedVideo
from recurra.files.reading import read_json

SUFFIXES = (".npz", ".json")
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

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: no video has a file, or the first file is not one of poses.
    """

    def __init__(self, folder: Path, videos: Path, listed: Sequence[CheckedVideo]) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(sentence("data.poses", f"{folder}, which is no folder", "a folder of pose files"))
        self.folder, self._videos = folder, videos
        files = [self.file(video.path) for video in listed]
        found = [file for file in files if file is not None]
        if not found:
            came = f"{folder}, which has no file for any of {len(files)} videos"
            raise ValueError(sentence("data.poses", came, "files named like the videos, .npz or .json"))
        if missing := len(files) - len(found):
            warnings.warn(f"{missing} of {len(files)} videos have no poses in {folder}", stacklevel=3)
        joints, features = read_poses(found[0])
        self.n_joints = joints.shape[1]
        self.d_features = None if features is None else features.shape[1]

    def file(self, video: Path) -> Path | None:
        """Return the pose file of a video, or None."""
        place = os.path.relpath(video, self._videos)  # without links, as poses are named like what the list names
        name = Path(video.name) if place.startswith(os.pardir) else Path(place)
        files = (self.folder / name.with_suffix(suffix) for suffix in SUFFIXES)
        return next((file for file in files if file.is_file()), None)

    def at(
        self, video: CheckedVideo, times: np.ndarray, n_segments: int
    ) -> tuple[Float[Tensor, "T J 2"], Float[Tensor, "S F"] | None]:
        """Return the joints at the times of a clip, in pixels of the video, and the mean features of each segment.

        Raises:
            ValueError: the file is not one of poses, or has another number of joints or features than the first.
        """
        file = self.file(video.path)
        if file is None:
            nothing = None if self.d_features is None else torch.full((n_segments, self.d_features), math.nan)
            return torch.full((len(times), self.n_joints, 2), math.nan), nothing
        joints, features = read_poses(file)
        came = (joints.shape[1], None if features is None else features.shape[1])
        if came != (self.n_joints, self.d_features):
            expected = f"as in the other files ({self.n_joints} and {self.d_features})"
            raise ValueError(sentence(str(file), f"a file of {came[0]} joints and {came[1]} features", expected))
        where = (times + _SAME_TIME) / video.info.duration
        chosen = torch.from_numpy(joints[_rows(where, len(joints))])
        if features is None:
            return chosen, None
        by_segment = features[_rows(where, len(features))].reshape(n_segments, -1, features.shape[1])
        return chosen, torch.from_numpy(by_segment.mean(1))


def read_poses(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a pose file: joints (frames, joints, 2), and features (rows, channels) if there are any, in float32.

    Raises:
        ValueError: the file is no such file; the message names it.
    """
    content = _read_npz(file) if file.suffix == ".npz" else read_json(file, most_bytes=_MOST_BYTES)
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
