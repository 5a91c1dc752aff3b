"""Frames of video files by their presentation times, through PyAV, which is imported when the first file is opened.

A frame is shown from its own time until the time of the next one. Times are in seconds from the first frame of the
file, so they mean the same whether the frame rate is constant or variable and in whatever order frames are stored.
"""

import importlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from recurra.checks import require, sentence

_REFERRING = frozenset(
    {"concat", "dash", "hls", "image2", "imf", "rtp", "rtsp", "sap", "sdp", "vobsub", "webm_dash_manifest"}
)
"""FFmpeg's formats whose files name other files or addresses, where the pictures are."""


def _open_container(path: str) -> Any:
    """Open a file with PyAV, by itself: neither a playlist nor a name with an address leads to anything else."""
    options = {"format_whitelist": _self_contained_formats(), "protocol_whitelist": "file"}
    # Titles and authors are not read here, and old files have them in old encodings.
    import av

    return av.open(path, container_options=options, metadata_errors="replace")


@cache
def _self_contained_formats() -> str:
    """List the formats that FFmpeg may take a file for, as its option wants them."""
    import av

    return ",".join(sorted(name for name in av.formats_available if not _REFERRING & set(name.split(","))))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ReadAhead(Generic[_Item, _Result]):
    """Calls `read` on the items of a step, and then on those of the step that will probably come next.

    The results are always those of `[read(item) for item in items]`, even if another step comes next.

    workers: threads; with 0 nothing is read ahead.
    """

    def __init__(self, read: Callable[[_Item], _Result], workers: int) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="recurra-decode") if workers else None
        self._pending: tuple[Hashable, list[Future[_Result]]] = (None, [])

    def get(
        self, step: Hashable, items: Sequence[_Item], following: tuple[Hashable, Sequence[_Item]] | None
    ) -> list[_Result]:
        """Return the results of a step; `following` is the next step and its items. Raises what `read` raises."""
        if self._pool is None:
            return [self._read(item) for item in items]
        expected, futures = self._pending
        if expected != step:
            for future in futures:
                future.cancel()
            futures = [self._pool.submit(self._read, item) for item in items]
        self._pending = (None, [])
        if following is not None:
            self._pending = (following[0], [self._pool.submit(self._read, item) for item in following[1]])
        return [future.result() for future in futures]


_SAME_TIME = 1e-6
"""Times closer than this, in seconds, are the same; no frame rate comes near it."""
_BACK_OFF = (0.0, 1.0, 4.0, 16.0)
"""How far before a time to seek, in seconds, if a seek to it lands behind it."""
_FAR = 5.0
"""Try a seek if a time is this many seconds ahead, in a file whose index is not known."""
_PAST_THE_END = 0.5
"""Seconds by which a header may overstate the end of the last frame, by rounding; if more, the file is cut off."""


class VideoError(ValueError):
    """The file cannot be read as a video: damaged, cut off, empty, or without a picture. The message names it."""


class VideoInfo(NamedTuple):
    """The size of a video, known without decoding it: see `VideoFile.probe`.

    n_frames: frames. duration: seconds from the start of the first frame to the end of the last. width, height: as
    shown, after any rotation.
    """

    n_frames: int
    duration: float
    width: int
    height: int

    @property
    def fps(self) -> float:
        """Frames per second on average."""
        return self.n_frames / self.duration


class VideoFrames(NamedTuple):
    """All frames of a video: see `VideoFile.decode`.

    path: of the file. times: (N,) seconds, ascending. pictures: (N, 3, H, W). end: of the last frame, in seconds.
    """

    path: str
    times: np.ndarray
    pictures: UInt8[Tensor, "N 3 H W"]
    end: float

    def at(self, times: Sequence[float] | np.ndarray) -> UInt8[Tensor, "T 3 H W"]:
        """Return what `VideoFile.frames_at` returns, with the same errors."""
        wanted = _require_times(times)
        _require_before_the_end(self.path, float(wanted.max()), self.end)
        return self.pictures[np.searchsorted(self.times, wanted + _SAME_TIME, side="right") - 1]


class VideoFile:
    """An open video file, for use in a `with` block and by one thread at a time.

    Applies a rotation by quarter turns in the display matrix of the file, but not a mirror.

    Args:
        path: a file that FFmpeg can read (mp4, mkv, avi, webm, ...); the first of several video streams is read.

    Raises:
        VideoError: the file has no video, or its first frame cannot be decoded; or it is a list of other files.
        ImportError: PyAV is not installed (the extra `video`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        import av

        self._av: Any = av
        self._seeking_pays = True
        # `frame.reformat` would set up a scaler for each frame, which takes most of the time at small sizes
        self._reformatter = importlib.import_module("av.video.reformatter").VideoReformatter()
        # Threads for a single small picture cost many times the work itself; PyAV before version 17 had none.
        self._one_thread = {"threads": 1} if int(self._av.__version__.split(".")[0]) >= 17 else {}
        self._open()

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def probe(self) -> VideoInfo:
        """Count the frames and measure the duration, from the header or, if it does not say, from the packets.

        Decodes only the first frame. Trusts the header: a file that ends early is only detected when it is read.
        """
        stream = self._stream
        if stream.frames and stream.duration:
            n_frames, duration = stream.frames, float(stream.duration * stream.time_base)
        else:
            with _as_video_errors(self._av, self.path), _open_container(self.path) as container:
                n_frames, duration = self._count_packets(container, container.streams[stream.index])
        return VideoInfo(n_frames, max(duration, self._frame_seconds), self.width, self.height)

    def frames_at(self, times: Sequence[float] | np.ndarray) -> UInt8[Tensor, "T 3 H W"]:
        """Return the frames shown at `times`, in seconds from the first frame, in any order, repeats allowed.

        Seeks to the key frame before a time if that saves decoding, and decodes only what is needed.

        Raises VideoError if the file is damaged, or ends more than half a second before a time.
        """
        wanted = _require_times(times)
        pictures: list[Tensor] = [torch.empty(0)] * len(wanted)
        shown, picture = None, None
        with _as_video_errors(self._av, self.path):
            for place in np.argsort(wanted, kind="stable"):
                self._go_to(float(wanted[place]))
                if picture is None or self._current is not shown:
                    shown, picture = self._current, self._picture(self._current[1])
                pictures[place] = picture
        return torch.stack(pictures)

    def decode(self) -> "VideoFrames":
        """Decode all frames, with their times. Raises VideoError if the file is damaged."""
        pairs = list(self.frames())
        times = np.array([time for time, _ in pairs])
        return VideoFrames(
            self.path, times, torch.stack([picture for _, picture in pairs]), self._end_of(*self._current)
        )

    def frames(self, rate: float | None = None) -> Iterator[tuple[float, UInt8[Tensor, "3 H W"]]]:
        """Yield (time, picture) from the start to the end, with only a few frames in memory at a time.

        rate: pictures per second, each the frame shown at 0, 1/rate, 2/rate, ...; None: every frame of the file.
        """
        require(rate is None or rate > 0, "rate", rate, "a positive number of frames per second")
        if self._current[0] > 0:
            self._reopen()
        n_given = 0
        while True:
            (time, frame), after = self._current, self._upcoming
            if rate is None:
                yield time, self._picture(frame)
            else:
                end = self._end_of(time, frame) if after is None else after[0]
                picture = None
                while n_given / rate < end - _SAME_TIME:
                    picture = self._picture(frame) if picture is None else picture
                    yield n_given / rate, picture
                    n_given += 1
            if after is None:
                return
            with _as_video_errors(self._av, self.path):
                self._step()

    def _open(self) -> None:
        with _as_video_errors(self._av, self.path):
            self._container = _open_container(self.path)
            try:
                self._start()
            except BaseException:
                self._container.close()
                raise

    def _start(self) -> None:
        cover = self._av.stream.Disposition.attached_pic  # the cover of a music file
        streams = [stream for stream in self._container.streams.video if not stream.disposition & cover]
        if not streams:
            raise VideoError(sentence(self.path, "a file without a video stream", "a video"))
        self._stream = stream = streams[0]
        stream.thread_type = "SLICE"
        rate = stream.average_rate or stream.guessed_rate
        self._frame_seconds = float(1 / rate) if rate else 1 / 25
        self._decoded = self._container.decode(stream)
        first = next(self._decoded, None)
        if first is None:
            raise VideoError(sentence(self.path, "a file with an empty video stream", "at least one frame"))
        # AVI stores no presentation times. If frames are stored out of order, the times that FFmpeg works out are not
        # always in order; but the frames are, and the frame rate of an AVI file is constant.
        guessed = self._container.format.name == "avi" and stream.codec_context.has_b_frames
        self._has_times = first.pts is not None and not guessed
        self._first_time = float(first.pts * stream.time_base) if self._has_times else 0.0
        self._size = (first.width, first.height)
        self._quarter_turns = round(first.rotation / 90) % 4
        self.width, self.height = self._size if self._quarter_turns % 2 == 0 else self._size[::-1]
        self._current: tuple[float, Any] = (0.0, first)
        self._upcoming = self._decode_next(0.0)

    def _reopen(self) -> None:
        """Return to the first frame. Not by a seek, which does not reach it in some files."""
        self.close()
        self._open()

    def _decode_next(self, time: float) -> tuple[float, Any] | None:
        """Decode the frame after the one at `time`, and return it with its own time; None at the end."""
        frame = next(self._decoded, None)
        return None if frame is None else (self._time_of(frame, time + self._frame_seconds), frame)

    def _time_of(self, frame: Any, otherwise: float) -> float:
        if frame.pts is None or not self._has_times:
            return otherwise
        return float(frame.pts * self._stream.time_base) - self._first_time

    def _end_of(self, time: float, frame: Any) -> float:
        return time + max(float((frame.duration or 0) * self._stream.time_base), self._frame_seconds)

    def _step(self) -> None:
        assert self._upcoming is not None
        self._current = self._upcoming
        self._upcoming = self._decode_next(self._current[0])

    def _go_to(self, time: float) -> None:
        """Make the frame shown at `time` the current one."""
        if self._current[0] > time + _SAME_TIME:
            self._reopen()
        if self._seek_saves_work(time):
            self._seek(time)
        while self._upcoming is not None and self._upcoming[0] <= time + _SAME_TIME:
            self._step()
        if self._upcoming is None:
            _require_before_the_end(self.path, time, self._end_of(*self._current))

    def _seek_saves_work(self, time: float) -> bool:
        """Tell whether there is a key frame between the upcoming frame and `time`."""
        if self._upcoming is None or self._upcoming[0] >= time or not (self._has_times and self._seeking_pays):
            return False
        # FFmpeg reads Matroska's index at the first seek; some formats have none, and PyAV before 17 does not show it.
        index: Any = getattr(self._stream, "index_entries", ())
        if len(index) <= 1:
            return time - self._upcoming[0] > _FAR
        entry = index.search_timestamp(self._timestamp(time))
        return entry >= 0 and index[entry].timestamp > self._timestamp(self._upcoming[0])

    def _timestamp(self, time: float) -> int:
        return int((time + self._first_time) / self._stream.time_base)

    def _seek(self, time: float) -> None:
        """Jump to a key frame at or before `time`, or to the start of the file if that fails."""
        assert self._upcoming is not None
        before = self._upcoming[0]
        for back in _BACK_OFF:
            self._container.seek(self._timestamp(max(time - back, 0.0)), stream=self._stream)
            self._decoded = self._container.decode(self._stream)
            # Frames before the first key frame may refer to pictures from before the jump.
            key = next((frame for frame in self._decoded if frame.key_frame), None)
            if key is not None and key.pts is not None and self._time_of(key, 0.0) <= time + _SAME_TIME:
                self._current = (self._time_of(key, 0.0), key)
                self._upcoming = self._decode_next(self._current[0])
                self._seeking_pays = self._current[0] > before
                return
        self._seeking_pays = False
        self._reopen()

    def _picture(self, frame: Any) -> UInt8[Tensor, "3 H W"]:
        # A stream may change its size on the way: all frames are scaled to the size of the first one.
        width, height = self._size
        rgb = self._reformatter.reformat(frame, width=width, height=height, format="rgb24", **self._one_thread)
        pixels = rgb.to_ndarray()
        turned = np.rot90(pixels, self._quarter_turns)  # counter-clockwise, as in the display matrix
        return torch.from_numpy(np.ascontiguousarray(turned.transpose(2, 0, 1)))

    def _count_packets(self, container: Any, stream: Any) -> tuple[int, float]:
        n_packets, end = 0, 0.0
        for packet in container.demux(stream):
            if not packet.size:
                continue
            n_packets += 1
            if packet.pts is not None:
                seconds = float((packet.duration or 0) * stream.time_base) or self._frame_seconds
                end = max(end, float(packet.pts * stream.time_base) - self._first_time + seconds)
        return n_packets, end if self._has_times else n_packets * self._frame_seconds


@contextmanager
def _as_video_errors(av: ModuleType, path: str) -> Iterator[None]:
    """Turn FFmpeg's errors in a `with` block into VideoError, except those of missing or forbidden files."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except av.error.ArgumentError as error:
        got = "a list of other files, which are not followed, or damaged"
        raise VideoError(sentence(path, got, "a video")) from error
    except (av.error.FFmpegError, EOFError) as error:
        raise VideoError(sentence(path, f"unreadable ({error})", "a video")) from error


def _require_times(times: Sequence[float] | np.ndarray) -> np.ndarray:
    wanted = np.asarray(times, dtype=np.float64)
    if wanted.ndim != 1 or not len(wanted) or not np.isfinite(wanted).all() or wanted.min() < 0:
        raise ValueError(sentence("times", wanted.tolist(), "a list of one or more finite seconds, none negative"))
    return wanted


def _require_before_the_end(path: str, time: float, end: float) -> None:
    if time > end + _PAST_THE_END:
        raise VideoError(sentence(path, f"{end:.2f} s long", f"a frame at {time:.2f} s"))


def probe_video(path: str | os.PathLike[str]) -> VideoInfo:
    """Find the frames, duration and size of a video file (see `VideoFile.probe`)."""
    with VideoFile(path) as video:
        return video.probe()
