"""How files are opened: each by itself."""

import av
import pytest

from recurra.video.reader import VideoError, VideoFile

CONCAT = "ffconcat version 1.0\nfile other.mp4\n"
PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("name", "content"), [("list.mp4", CONCAT), ("list.m3u8", PLAYLIST), ("list.ffconcat", CONCAT)]
)
def test_a_list_of_other_files_is_not_followed(write_video, name, content):
    path = write_video("other.mp4", 3).with_name(name)
    path.write_text(content)
    with av.open(str(path)) as container:  # FFmpeg itself would follow it
        assert container.streams.video
    with pytest.raises(VideoError, match=rf"{name} is a list of other files, which are not followed.*; expected"):
        VideoFile(path)


def test_a_name_is_no_address(write_video, monkeypatch):
    path = write_video("other.mp4", 3)
    monkeypatch.chdir(path.parent)
    with pytest.raises(VideoError):
        VideoFile("concat:other.mp4|other.mp4")
    with VideoFile("other.mp4") as video:
        assert video.probe().n_frames == 3


def test_a_title_in_another_encoding_is_passed_over(write_video):
    path = write_video("old.mp4", 3)
    content = path.read_bytes()
    assert content.count(b"Lavf") == 1  # the name of the program that wrote it stands for a title
    path.write_bytes(content.replace(b"Lavf", b"L\xeevf"))
    with pytest.raises(UnicodeDecodeError):
        av.open(str(path))
    with VideoFile(path) as video:
        assert video.probe().n_frames == 3
