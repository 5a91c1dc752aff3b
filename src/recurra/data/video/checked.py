"""Check every file of a split once, before training on it."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from recurra.checks import sentence
from recurra.data.cache import Cache
from recurra.data.progress import item_progress
from recurra.data.video.layouts import Video, some
from recurra.data.video.reader import VideoError, VideoInfo, probe_video
from recurra.files.reading import read_json

_FINDINGS = 1  # the format of cache entries
_MOST_BYTES = 2**30


class CheckedVideo(NamedTuple):
    """A video that opens, is long enough, and whose first frame decodes."""

    path: Path
    label: int
    info: VideoInfo


def check_videos(
    what: str, videos: Sequence[Video], *, skip: bool, min_frames: int, workers: int, store: Cache
) -> list[CheckedVideo]:
    """Return the usable videos of a split, in order, with their frames, duration and size.

    Opens every file and decodes its first frame. The findings are cached in `store` and used again for as long as the
    names, sizes and modification times of all files stay the same.

    what: the split, in words, for messages. skip: warn once about unusable files, with their number and the first
    names; otherwise raise. min_frames: videos with fewer frames are unusable.

    Raises VideoError for unusable files unless `skip` is set, and in any case if no file is usable; OSError for a file
    that cannot be opened at all.
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
        came = f"{len(videos)} files, {len(bad)} of them unusable ({some(bad)})"
        raise VideoError(sentence(what, came, f"videos with at least {min_frames} frames"))
    if bad:
        warnings.warn(f"skipping {len(bad)} of {len(videos)} files of {what}, unusable: {some(bad)}", stacklevel=3)
    return good


def _findings(paths: list[Path], workers: int, store: Cache) -> list[VideoInfo | str]:
    """Return what is known about each file, or the reason why it is unusable."""
    sizes = [(str(path), status.st_size, status.st_mtime_ns) for path in paths for status in (path.stat(),)]
    made_from = {
        "what": "what was found in video files",
        "findings": _FINDINGS,
        "files": hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
    }

    def write(out: Any) -> None:
        with item_progress("checking the videos", len(paths)) as count, ThreadPoolExecutor(max(1, workers)) as pool:
            looked = []
            for finding in pool.map(_look_at, paths):
                looked.append(finding)
                count(1)
        out.write(json.dumps(looked).encode())

    kept = read_json(store.get("videos", made_from, write), kind=list, most_bytes=_MOST_BYTES)
    return [finding if isinstance(finding, str) else VideoInfo(*finding) for finding in kept]


def _look_at(path: Path) -> VideoInfo | str:
    if not path.stat().st_size:
        return "an empty file"
    try:
        return probe_video(path)
    except VideoError as error:
        return str(error).removeprefix(f"{path} is ")
