import random

import av
import numpy as np
import pytest
import torch

from recurra.video.reader import VideoError, VideoFile, probe_video

# As FFmpeg decodes from the start to the end, without our reader.
FORMATS = {
    "h264.mp4": {},
    "h264.avi": {},
    "b-frames.mp4": {"options": {"bf": "3", "g": "7", "crf": "4"}},
    "open-gop.mkv": {"options": {"bf": "3", "g": "7", "crf": "4", "x264-params": "open-gop=1:scenecut=0"}},
    "mpeg4.avi": {"codec": "mpeg4", "options": {"bf": "2", "g": "9", "qscale": "2"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "8", "deadline": "realtime", "cpu-used": "8"}},
    "variable.mkv": {"times": [0.001 * i * i + 0.02 * i for i in range(41)], "options": {"g": "6", "crf": "4"}},
    "late-start.mkv": {"times": [3 + 0.1 * i for i in range(41)], "options": {"g": "6", "crf": "4"}},
    "with-sound.mkv": {"sound": True},
}


def decoded_straight(path):
    """Every frame's time and picture, from a plain loop over FFmpeg's decoder. AVI's rate is constant, and FFmpeg's
    times for frames out of order are sometimes wrong."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [(float(f.pts * stream.time_base), f.to_ndarray(format="rgb24")) for f in container.decode(stream)]
    times = np.array([time for time, _ in frames])
    if path.suffix == ".avi":
        times = np.arange(len(times)) / 10
    return times - times[0], torch.from_numpy(np.stack([picture for _, picture in frames])).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_seeking_gives_the_frames_of_a_full_decode(name, write_video):
    path = write_video(name, 41, **FORMATS[name])
    times, pictures = decoded_straight(path)
    assert len(times) == 41
    assert len(torch.unique(pictures.flatten(1), dim=0)) == 41  # otherwise nothing would be told apart
    for i in random.Random(0).sample(range(41), 14):
        with VideoFile(path) as video:  # straight from the start to one frame
            assert torch.equal(video.frames_at([times[i] + 0.001])[0], pictures[i]), i
    with VideoFile(path) as video:  # one reader, forwards and backwards
        for wanted in (range(0, 41, 13), [40], [3, 2, 2, 30], range(41), [0]):
            wanted = list(wanted)
            assert torch.equal(video.frames_at(times[wanted]), pictures[wanted])
        whole = video.decode()
    np.testing.assert_allclose(whole.times, times, atol=1e-9)
    assert torch.equal(whole.pictures, pictures)


def test_a_frame_is_shown_until_the_next_one(write_video):
    path = write_video("a.mp4", 5, times=[0.0, 0.1, 0.5, 0.6, 2.0])
    with VideoFile(path) as video:
        whole = video.decode()
        np.testing.assert_allclose(whole.times, [0, 0.1, 0.5, 0.6, 2.0], atol=1e-3)
        wanted = [0.0, 0.099, 0.101, 0.499, 0.501, 0.599, 0.65, 1.999, 2.001, 2.05]
        expected = whole.pictures[[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]
        assert torch.equal(video.frames_at(wanted), expected)
        assert torch.equal(whole.at(wanted), expected)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "ts"])
def test_probe(suffix, write_video):
    info = probe_video(write_video(f"a.{suffix}", 24, rate=12))
    assert (info.n_frames, info.width, info.height) == (24, 48, 32)
    assert info.duration == pytest.approx(2.0, abs=0.01)
    assert info.fps == pytest.approx(12, abs=0.1)


def test_a_seek_decodes_only_from_the_key_frame_before(write_video):
    path = write_video("a.mp4", 100, options={"g": "10", "bf": "0", "crf": "30", "preset": "ultrafast"})
    with VideoFile(path) as video:
        read = []
        decode_next = video._decode_next
        video._decode_next = lambda time: read.append(time) or decode_next(time)
        video.frames_at([9.55])
        assert len(read) <= 8
        read.clear()
        video.frames_at([9.65])
        assert len(read) <= 1  # no step back where the next frame is what is wanted


def test_rotation(write_video):
    upright = write_video("upright.mp4", 3)
    with VideoFile(upright) as video:
        picture = video.frames_at([0.0])[0]
    for angle in (90, 180, -90):
        turned = write_video("turned.mp4", 3, rotation=angle)
        with VideoFile(turned) as video:
            assert torch.equal(video.frames_at([0.0])[0], torch.rot90(picture, angle // 90, (1, 2)))
            assert (video.width, video.height) == ((48, 32) if angle == 180 else (32, 48))
        info = probe_video(turned)
        assert (info.width, info.height) == ((48, 32) if angle == 180 else (32, 48))


def test_frames_at_a_rate(write_video):
    path = write_video("a.mkv", 12, rate=10)
    times, pictures = decoded_straight(path)
    with VideoFile(path) as video:
        for _ in range(2):  # a second pass begins at the start
            given = list(video.frames(4.0))
            assert [time for time, _ in given] == [0, 0.25, 0.5, 0.75, 1.0]  # 1.2 s
            assert torch.equal(torch.stack([p for _, p in given]), pictures[[0, 2, 5, 7, 10]])
        given = list(video.frames(20.0))
        assert len(given) == 24
        assert torch.equal(torch.stack([p for _, p in given]), pictures.repeat_interleave(2, 0))
        given = list(video.frames())
        assert [round(time, 6) for time, _ in given] == [round(time, 6) for time in times]
    with pytest.raises(ValueError, match=r"rate is .*; expected a positive number"), VideoFile(path) as video:
        next(video.frames(0.0))


def test_odd_sizes(write_video):
    path = write_video("odd.mkv", np.random.default_rng(0).integers(0, 255, (3, 35, 49, 3), np.uint8), codec="ffv1")
    with VideoFile(path) as video:
        assert video.frames_at([0.0]).shape == (1, 3, 35, 49)


def test_damaged_bytes_are_an_error(write_video):
    path = write_video("a.mp4", 40)
    data = bytearray(path.read_bytes())
    middle = data.find(b"mdat") + 1200
    data[middle : middle + 300] = b"\xff" * 300
    path.write_bytes(data)
    with pytest.raises(VideoError, match=r"a\.mp4 is unreadable \(.*; expected a video"), VideoFile(path) as video:
        video.decode()


def test_a_file_that_ends_early_is_an_error(write_video):
    path = write_video("a.mkv", 60, cut=0.4)
    with VideoFile(path) as video:
        assert video.frames_at([0.3]).shape[0] == 1
        with pytest.raises(VideoError, match=r"a\.mkv is (.* s long|unreadable)"):
            video.frames_at([0.1, 5.9])


@pytest.mark.parametrize(
    ("name", "content"),
    [("empty.mp4", b""), ("text.mp4", b"not a video at all\n" * 50), ("zeros.mkv", bytes(4000)), ("cut.mp4", None)],
)
def test_no_video_at_all(name, content, write_video, tmp_path):
    path = tmp_path / name
    if content is None:
        write_video(name, 20, cut=0.5)  # the index of this file is at its end
    else:
        path.write_bytes(content)
    with pytest.raises(VideoError, match=name):
        probe_video(path)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "aac"), ("b.mkv", "aac"), ("c.avi", "pcm_s16le"), ("d.mkv", "pcm_s16le")]
)
def test_sound_alone(name, codec, write_sound):
    with pytest.raises(VideoError, match="without a video stream"):
        probe_video(write_sound(name, codec))


def test_the_cover_of_a_record_is_no_video(tmp_path, write_sound):
    sound, path = write_sound("sound.mp4", "aac"), tmp_path / "record.mp4"
    with av.open(str(sound)) as source, av.open(str(path), "w") as container:
        audio = container.add_stream_from_template(source.streams.audio[0])
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
        packets = cover.encode(frame) + cover.encode()
        container.mux(packets)
        for packet in source.demux(source.streams.audio[0]):
            if packet.size:
                packet.stream = audio
                container.mux(packet)
    with av.open(str(path)) as container:
        assert len(container.streams.video) == 1  # FFmpeg calls it a video stream
    with pytest.raises(VideoError, match="without a video stream"):
        probe_video(path)


@pytest.mark.parametrize("times", [[], [-0.1], [float("nan")], [[0.0]]])
def test_bad_times(times, write_video):
    path = write_video("a.mp4", 3)
    with VideoFile(path) as video, pytest.raises(ValueError, match=r"times is .*; expected a list"):
        video.frames_at(np.array(times))
    with VideoFile(path) as video, pytest.raises(ValueError, match=r"times is .*; expected a list"):
        video.decode().at(np.array(times))
