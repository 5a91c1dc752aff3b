"""Looking at every file of a split once, before anything is trained on it."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from recurra.data.cache import Cache
from recurra.data.progress import item_progress
from recurra.data.video.layouts import Video, some
from recurra.data.video.reader import VideoError, VideoInfo, probe_video

_FINDINGS = 1  # the form of what is kept in the cache


class CheckedVideo(NamedTuple):
    """A video that opens, whose first frame decodes, and that is long enough."""

    path: Path
    label: int
    info: VideoInfo


def check_videos(
    what: str, videos: Sequence[Video], *, skip: bool, min_frames: int, workers: int, store: Cache
) -> list[CheckedVideo]:
    """The videos of a split that can be used, with what is known of them, in their order.

    Every file is opened and its first frame decoded. What was found is kept in `store` and used again as long as
    names, sizes and modification times of all the files are the same.

    what: the split in words, for messages. skip: warn once, with how many and the first names, of what cannot be
    used; otherwise raise. min_frames: fewer are too short.

    Raises VideoError for a file that cannot be used, unless `skip`, and in any case where none can be; OSError for
    one that cannot be opened at all.
    """
    found = _findings([video.path for video in videos], workers, store)
    good, bad = [], []
    for video, finding in zip(videos, found):
        if isinstance(finding, str):
            bad.append(f"{video.path.name} ({finding})")
        elif finding.n_frames < min_frames:
            bad.append(f"{video.path.name} ({finding.n_frames} frames, fewer than min_frames {min_frames})")
        else:
            good.append(CheckedVideo(video.path, video.label, finding))
    if bad and (not skip or not good):
        raise VideoError(f"{len(bad)} of {len(videos)} files of {what} cannot be used: {some(bad)}")
    if bad:
        warnings.warn(
            f"{len(bad)} of {len(videos)} files of {what} cannot be used and are left out: {some(bad)}", stacklevel=3
        )
    return good


def _findings(paths: list[Path], workers: int, store: Cache) -> list[VideoInfo | str]:
    """Of each file what is known of it, or why it cannot be used."""
    sizes = [(str(path), status.st_size, status.st_mtime_ns) for path in paths for status in (path.stat(),)]
    made_from = {
        "what": "what was found in video files",
        "findings": _FINDINGS,
        "files": hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
    }

    def write(out: Any) -> None:
        with item_progress("looking at the videos", len(paths)) as count, ThreadPoolExecutor(max(1, workers)) as pool:
            looked = []
            for finding in pool.map(_look_at, paths):
                looked.append(finding)
                count(1)
        out.write(json.dumps(looked).encode())

    kept = json.loads(store.get("videos", made_from, write).read_bytes())
    return [finding if isinstance(finding, str) else VideoInfo(*finding) for finding in kept]


def _look_at(path: Path) -> VideoInfo | str:
    if not path.stat().st_size:
        return "an empty file"
    try:
        return probe_video(path)
    except VideoError as error:
        return str(error).removeprefix(f"{path} ")
