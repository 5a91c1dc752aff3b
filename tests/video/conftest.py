from fractions import Fraction

import av
import jaxtyping
import numpy as np
import pytest


def numbered_pictures(n, height=32, width=48):
    """Pictures that tell their number by the gray below right, and noise, and which way up they are by a mark."""
    pictures = np.empty((n, height, width, 3), dtype=np.uint8)
    blocks = np.random.default_rng(0).integers(0, 256, (n, height // 8, width // 8), dtype=np.uint8)
    for number in range(n):
        pictures[number] = 20 + 200 * number // max(1, n - 1)
        pictures[number, : height // 2, : width // 2] = 250  # the corner at the top left
        noise = blocks[number].repeat(4, 0).repeat(4, 1)
        pictures[number, : height // 2, width // 2 :] = noise[: height // 2, : width - width // 2, None]
    return pictures


@pytest.fixture
def write_video(tmp_path):
    """Write pictures (or so many numbered ones) to a file; returns its path."""

    def write(
        name, pictures=12, *, codec="libx264", rate=10, options=None, times=None, rotation=None, sound=False, cut=None
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(pictures, int):
            pictures = numbered_pictures(pictures)
        options = {"crf": "4"} if options is None and codec == "libx264" else options or {}
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=rate, options=options)
            stream.height, stream.width = pictures.shape[1:3]
            stream.pix_fmt = "yuv420p"
            if rotation is not None:
                stream.set_display_rotation(rotation)
            if times is not None:
                stream.codec_context.time_base = Fraction(1, 1000)
            audio = container.add_stream("aac", rate=8000, layout="mono") if sound else None
            for number, picture in enumerate(pictures):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                if times is not None:
                    frame.pts, frame.time_base = round(times[number] * 1000), Fraction(1, 1000)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
            if audio is not None:
                for frame in tones(4 * len(pictures) // rate + 4):
                    container.mux(audio.encode(frame))
                container.mux(audio.encode())
        if cut is not None:
            path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
        return path

    return write


def tones(n):
    """n quarters of a second of sound."""
    for number in range(n):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 2000), dtype=np.float32), format="fltp", layout="mono")
        frame.rate, frame.pts = 8000, 2000 * number
        yield frame


@pytest.fixture
def write_sound(tmp_path):
    """Write a file without a picture."""

    def write(name, codec):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=8000, layout="mono")
            resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=8000)
            for frame in tones(4):
                for resampled in resampler.resample(frame):
                    container.mux(stream.encode(resampled))
            container.mux(stream.encode())
        return path

    return write


def brightness(pictures):
    """The number's gray in each picture, from the quarter without the mark: (N,)."""
    height, width = pictures.shape[-2:]
    return pictures[..., height // 2 + 2 :, width // 2 + 2 :].float().mean((-3, -2, -1))


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    """The user's cache folder, so that no test touches the real one."""
    folder = tmp_path_factory.mktemp("user-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def no_type_checker(monkeypatch):
    """Switch off a run-time type checker, which would refuse bad arguments before the code under test can."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
