import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import recurra.video.motions as motions
from recurra.video.motions import _DIRECTIONS, MotionsConfig, write_motions
from recurra.video.reader import VideoFile

SMALL = {"n_videos": 20, "frames_per_motion": 4, "image_size": 16, "n_frames": 4, "workers": 0, "batch_size": 6}


def displacement(before, after):
    """How far the bright shape moved, around the edges: the peak of the circular cross-correlation, in pixels."""
    spectra = [np.fft.rfft2(np.maximum(picture.astype(float).max(-1) - 90, 0)) for picture in (before, after)]
    peak = np.fft.irfft2(spectra[1] * spectra[0].conj(), before.shape[:2])
    rows, columns = np.unravel_index(peak.argmax(), peak.shape)
    size = len(before)
    return tuple(int((moved + size // 2) % size - size // 2) for moved in (columns, rows))


def test_the_files_are_videos_of_their_classes(tmp_path):
    folder = tmp_path / "motions"
    write_motions(folder, 30, n_motions=8, frames_per_motion=4, image_size=32, seed=5)
    names = (folder / "classes.txt").read_text().splitlines()
    assert len(names) == 64
    assert names[:3] == ["right then right", "right then down", "right then left"]
    rows = {split: (folder / f"{split}.csv").read_text().splitlines()[1:] for split in ("train", "valid", "test")}
    assert [len(rows[split]) for split in rows] == [24, 3, 3]
    paths = [row.split(",")[0] for split in rows for row in rows[split]]
    assert len(set(paths)) == 30
    for row in rows["train"] + rows["test"]:
        path, name = row.split(",")
        first, second = (_DIRECTIONS[word] for word in name.split(" then "))
        with VideoFile(folder / path) as video:
            pictures = video.decode().pictures.permute(0, 2, 3, 1).numpy()
        assert pictures.shape == (8, 32, 32, 3)
        for number in range(1, 8):
            assert tuple(np.sign(displacement(*pictures[number - 1 : number + 1]))) == (first if number < 4 else second)


def test_writing_again(tmp_path, monkeypatch):
    # The pictures as they are drawn: x264 may round them differently from call to call.
    monkeypatch.setattr(motions, "_write_video", lambda path, pictures: path.write_bytes(pictures.tobytes()))
    options = {"n_motions": 2, "frames_per_motion": 2, "image_size": 16}
    folder = tmp_path / "deep" / "motions"
    write_motions(folder, 10, **options)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_motions(folder, 10, **options)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(ValueError, match=r"which has other motions .*; expected a new folder"):
        write_motions(folder, 10, **options, seed=1)
    write_motions(tmp_path / "again", 10, **options)
    for path in before:
        if path.suffix in (".csv", ".txt", ".mp4"):
            assert (tmp_path / "again" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").touch()
    with pytest.raises(ValueError, match="which has other files; expected a new or empty folder"):
        write_motions(tmp_path / "letters", 10, **options)
    assert json.loads((folder / "motions.json").read_text())["seed"] == 0


def test_an_interrupted_call_leaves_nothing(tmp_path, monkeypatch):
    write, written = motions._write_video, []

    def fail_at_the_fifth(path, pictures):
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(path)
        write(path, pictures)

    monkeypatch.setattr(motions, "_write_video", fail_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        write_motions(tmp_path / "motions", 10, image_size=16)
    assert [path.name for path in tmp_path.iterdir()] == [".motions.lock"]


def test_what_killed_processes_left_is_removed(tmp_path):
    (left := tmp_path / ".motions.0123456789abcdef.tmp" / "videos").mkdir(parents=True)
    (other := tmp_path / ".others.0123456789abcdef.tmp").mkdir()
    write_motions(tmp_path / "motions", 10, frames_per_motion=2, image_size=16)
    assert not left.parent.exists()
    assert other.exists()


def test_two_processes_at_once_without_locks(tmp_path, monkeypatch):
    """The one that comes second takes what the first one made."""
    monkeypatch.setattr(motions, "locked", lambda path: contextlib.nullcontext(False))
    folder, write = tmp_path / "motions", motions._write_video
    options = {"frames_per_motion": 2, "image_size": 16}

    def let_another_one_win(path, pictures):
        monkeypatch.setattr(motions, "_write_video", write)
        write_motions(folder, 10, **options)
        write(path, pictures)

    monkeypatch.setattr(motions, "_write_video", let_another_one_win)
    write_motions(folder, 10, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["motions"]
    assert len(list((folder / "videos").iterdir())) == 10


def test_as_a_data_set(user_cache):
    config = MotionsConfig(**SMALL, seed=3)
    data = config.build()
    assert data.output_size == len(data.class_names) == 16
    assert (data.n_frames, data.n_segments, data.image_size) == (4, 2, 16)
    assert [len(data.videos(split)) for split in ("train", "valid", "test")] == [16, 2, 2]
    assert Path(data.config.path).parent == user_cache / "recurra"
    batch = data.source("train").batch(0, 0)
    assert batch.inputs.shape == (6, 8, 3, 16, 16)
    # All frames, in order, unscaled and not mirrored, whatever the epoch.
    number = next(n for n, video in enumerate(data.videos("train")) if video.path.name == "000003.mp4")
    with VideoFile(data.videos("train")[number].path) as video:
        expected = (video.decode().pictures.float() / 255 - 0.45) / 0.225
    for epoch in range(3):
        clips = torch.cat([data.source("train").batch(epoch, step).inputs for step in range(3)])
        assert any(torch.allclose(clip, expected, atol=1e-6) for clip in clips)
    assert [len(view.inputs) for view in data.views("test")] == [2]
    assert config.build().videos("train") == data.videos("train")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_videos", 9, "n_videos is 9; expected at least 10"),
        ("n_motions", 1, "n_motions is 1; expected at least 2"),
        ("n_motions", 9, "n_motions is 9; expected at most 8"),
        ("image_size", 14, "image_size is 14; expected at least 16"),
        ("image_size", 33, "image_size is 33; expected an even number"),
        ("n_segments", 0, "n_segments is 0; expected at least 1"),
    ],
)
def test_bad_values(field, value, message, no_type_checker):
    with pytest.raises(ValueError, match=rf"^data\.{message}"):
        MotionsConfig(**{field: value})
