import shutil
from pathlib import Path

import pytest
import torch

import recurra.video.layouts as checked
from recurra.data.batches import IGNORED_TARGET
from recurra.video.data import VideoConfig
from recurra.video.reader import VideoError, VideoFile

SMALL = {"n_frames": 2, "n_segments": 3, "image_size": 16, "flip": False, "workers": 0}
N = {"train": 7, "valid": 3, "test": 4}
GRAY = dict(zip(N, ([30, 60, 90, 120, 150, 180, 210], [40, 100, 160], [50, 80, 110, 140])))


@pytest.fixture
def make_folder(tmp_path, write_video):
    """Videos of one gray each, by which they are known, of class (number of the video) mod 3."""

    def make(**more):
        import numpy as np

        for split, n in N.items():
            lines = [f"{split}{i}.mp4,class{i % 3}" for i in range(n)]
            for i in range(n):
                write_video(f"{split}{i}.mp4", np.full((9 + i, 16, 16, 3), GRAY[split][i], np.uint8))
            lines += more.get(split, [])
            (tmp_path / f"{split}.csv").write_text("\n".join(lines))
        return tmp_path

    return make


def which(clips, split):
    """The videos that clips are from, by their gray; -1 for a clip of zeros."""
    gray = ((clips.flatten(1).mean(1) * 0.225 + 0.45) * 255).tolist()
    return [
        -1 if not clip.any() else min(range(N[split]), key=lambda i: abs(GRAY[split][i] - value))
        for clip, value in zip(clips, gray)
    ]


@pytest.mark.parametrize(("workers", "keep"), [(0, True), (2, False)])
def test_training_takes_every_video_once_an_epoch(workers, keep, make_folder):
    options = {**SMALL, "workers": workers, "keep_decoded": keep, "batch_size": 3}
    source = VideoConfig(path=str(make_folder()), **options).build().source("train")
    assert len(source) == 3
    orders = []
    for epoch in range(3):
        batches = [source.batch(epoch, step) for step in range(3)]
        assert [len(batch.inputs) for batch in batches] == [3, 3, 1]
        videos = [number for batch in batches for number in which(batch.inputs, "train")]
        assert sorted(videos) == list(range(7))
        targets = torch.cat([batch.targets for batch in batches])
        assert targets.tolist() == [[number % 3] * 3 for number in videos]
        orders.append(videos)
    assert orders[0] != orders[1]


def test_a_batch_depends_on_the_seed_epoch_and_step_alone(make_folder, write_video):
    folder = make_folder()
    for i in range(7):
        write_video(f"train{i}.mp4", 12 + i)  # pictures that differ from frame to frame
    options = {**SMALL, "scale_jitter": (16, 22), "flip": True, "batch_size": 4}
    first = VideoConfig(path=str(folder), **options).build().source("train")
    wanted = {place: first.batch(*place) for place in [(0, 0), (0, 1), (1, 0), (5, 1)]}
    epochs = [torch.cat([first.batch(epoch, step).inputs for step in range(2)]) for epoch in range(2)]
    assert len(torch.unique(torch.cat(epochs).flatten(1), dim=0)) == 14  # no video is seen alike in two epochs
    for change in ({}, {"workers": 2}, {"keep_decoded": True}, {"workers": 1, "keep_decoded": True}):
        again = VideoConfig(path=str(folder), **{**options, **change}).build().source("train")
        for place in [(5, 1), (0, 1), (1, 0), (0, 0), (0, 1)]:  # in another order
            batch = again.batch(*place)
            assert torch.equal(batch.inputs, wanted[place].inputs), (change, place)
            assert torch.equal(batch.targets, wanted[place].targets)
    other = VideoConfig(path=str(folder), **options, seed=1).build().source("train").batch(0, 0)
    assert not torch.equal(other.inputs, wanted[0, 0].inputs)


def test_ranks_share_a_step(make_folder):
    config = VideoConfig(path=str(make_folder()), **SMALL, batch_size=4, eval_batch_size=2)
    alone = config.build().source("train").batch(2, 0)
    ranks = [config.build(rank=rank, world_size=2) for rank in (0, 1)]
    shared = [data.source("train").batch(2, 0) for data in ranks]
    assert torch.equal(torch.cat([batch.inputs for batch in shared]), alone.inputs)
    sources = [data.source("valid") for data in ranks]  # 3 videos, 2 at a time
    counted = []
    for step in range(2):
        for source in sources:
            batch = source.batch(0, step)
            rows = (batch.targets[:, -1] != IGNORED_TARGET).tolist()
            counted += [number for number, row in zip(which(batch.inputs, "valid"), rows) if row]
    assert sorted(counted) == [0, 1, 2]
    with pytest.raises(ValueError, match="a multiple of world_size"):
        config.build(rank=0, world_size=3)


def test_evaluation_is_fixed_and_asks_the_last_segment(make_folder):
    data = VideoConfig(path=str(make_folder()), **SMALL, eval_batch_size=2).build()
    source = data.source("valid")
    assert [which(source.batch(0, step).inputs, "valid") for step in range(2)] == [[0, 1], [2]]
    batch = source.batch(0, 1)
    assert batch.targets.tolist() == [[IGNORED_TARGET, IGNORED_TARGET, 2]]
    assert torch.equal(source.batch(9, 1).inputs, batch.inputs)


def test_clips_are_the_frames_of_their_times(make_folder, write_video):
    """Two of three segments of 2 frames over 12 frames: every other frame, in order."""
    folder = make_folder()
    write_video("valid0.mp4", 12)
    with VideoFile(folder / "valid0.mp4") as video:
        pictures = video.decode().pictures
    options = {**SMALL, "image_size": 32}
    clip = VideoConfig(path=str(folder), **options).build().source("valid").batch(0, 0).inputs[0]
    expected = (pictures[1::2, :, :, 8:40].float() / 255 - 0.45) / 0.225
    torch.testing.assert_close(clip, expected)
    at_rate = VideoConfig(path=str(folder), **options, frame_rate=10.0).build().source("valid").batch(0, 0).inputs[0]
    torch.testing.assert_close(at_rate, (pictures[3:9, :, :, 8:40].float() / 255 - 0.45) / 0.225)


def test_the_fingerprint_is_of_the_lists_and_sizes_wherever_the_folder_lies(make_folder, tmp_path_factory):
    def fingerprint(name="train.csv", before="", after=""):
        copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True))
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content.replace(before.encode(), after.encode(), 1))
        return VideoConfig(path=str(copy), **SMALL).build().fingerprint()

    folder = make_folder()
    own = VideoConfig(path=str(folder), **SMALL).build().fingerprint()
    assert own == fingerprint() == fingerprint("test.csv", "class0", "class1")
    changed = [fingerprint(name, "class0", "class1") for name in ("train.csv", "valid.csv")]
    assert len({own, *changed, fingerprint("train0.mp4", after="one byte more")}) == 4


@pytest.mark.parametrize(("workers", "world_size"), [(0, 1), (1, 2)])
def test_views_cover_every_video(workers, world_size, make_folder, write_video):
    folder = make_folder()
    write_video("test1.mp4", 30)
    config = VideoConfig(
        path=str(folder), **{**SMALL, "workers": workers}, test_views=5, test_crops=3, eval_batch_size=8 * world_size
    )
    rows, inputs = [], []
    for rank in range(world_size):
        views = config.build(rank=rank, world_size=world_size).views("test")
        batches = list(views)
        assert len(batches) == len(views) == -(-20 // world_size // 2)
        assert all(len(batch.inputs) == 6 for batch in batches)
        for step in (len(views) - 1, 0):
            assert torch.equal(views.batch(step).inputs, batches[step].inputs)
        for batch in batches:
            assert (batch.targets[:, :2] == IGNORED_TARGET).all()
            assert batch.targets[:, 2].tolist() == [number % 3 for number in batch.videos.tolist()]
            rows += batch.videos.tolist()
            inputs += list(batch.inputs)
        with pytest.raises(IndexError):
            views.batch(len(views))
    assert sorted(rows) == [number for number in range(4) for _ in range(15)]
    of_one = torch.stack([view for view, number in zip(inputs, rows) if number == 1])
    assert len(torch.unique(of_one.flatten(1), dim=0)) == 15  # no view twice


# --- files that are no videos ---


def bad_files(folder, write_video, write_sound):
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("no video " * 100)
    write_sound("sound.mkv", "aac")
    write_video("short.mp4", 1)
    return [f"{name},class1" for name in ("empty.mp4", "text.mp4", "sound.mkv", "short.mp4")]


def test_bad_files_are_left_out_with_one_warning(make_folder, write_video, write_sound, tmp_path):
    folder = make_folder(train=bad_files(tmp_path, write_video, write_sound))
    data = VideoConfig(path=str(folder), **SMALL).build()
    with pytest.warns(UserWarning, match="4 of 11 files of the train split") as caught:
        sources = [data.source("train") for _ in range(2)]  # the second is not told again
    assert len(caught) == 1
    text = str(caught[0].message)
    for expected in (
        "empty.mp4 (an empty file)",
        "text.mp4 (unreadable",
        "sound.mkv (a file without a video stream; expected a video)",
        "short.mp4 (a single frame)",
    ):
        assert expected in text
    assert sorted(which(sources[0].batch(0, 0).inputs, "train")) == list(range(7))
    with pytest.raises(VideoError, match=r"the train split .* is 11 files, 4 of them unusable \(empty"):
        VideoConfig(path=str(folder), **SMALL, on_bad_file="error").build().source("train")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_fails_later_is_a_gray_clip_without_targets(workers, make_folder):
    folder = make_folder()
    config = VideoConfig(path=str(folder), **{**SMALL, "workers": workers}, test_views=2, test_crops=2)
    data = config.build()
    source, views = data.source("test"), data.views("test")
    (folder / "test1.mp4").write_bytes(b"damaged")
    (folder / "test3.mp4").unlink()
    with pytest.warns(UserWarning, match="could not be decoded") as caught:
        batches = [source.batch(0, 0), source.batch(1, 0)]
    assert len(caught) == 2  # each file is told once
    assert "(1 so far)" in str(caught[0].message)
    assert "test1.mp4" in str(caught[0].message)
    assert "(2 so far)" in str(caught[1].message)
    for batch in batches:
        assert which(batch.inputs, "test") == [0, -1, 2, -1]
        assert batch.inputs.shape == (4, 6, 3, 16, 16)
        assert batch.targets[:, 2].tolist() == [0, IGNORED_TARGET, 2, IGNORED_TARGET]
    with pytest.warns(UserWarning, match="could not be decoded"):
        rows = [row for batch in views for row in zip(batch.videos.tolist(), batch.targets[:, 2].tolist())]
    assert set(rows) == {(0, 0), (1, IGNORED_TARGET), (2, 2), (3, IGNORED_TARGET)}
    assert len(rows) == 16


def test_a_file_that_fails_later_may_be_an_error(make_folder):
    folder = make_folder()
    data = VideoConfig(path=str(folder), **SMALL, on_bad_file="error").build()
    source, views = data.source("test"), data.views("test")
    (folder / "test1.mp4").write_bytes(b"damaged")
    with pytest.raises(VideoError, match=r"test1\.mp4"):
        source.batch(0, 0)
    with pytest.raises(VideoError, match=r"test1\.mp4"):
        list(views)


def test_files_are_looked_at_once(make_folder, monkeypatch):
    folder = make_folder()
    looked = []
    probe = checked.probe_video
    monkeypatch.setattr(checked, "probe_video", lambda path: looked.append(path.name) or probe(path))
    config = VideoConfig(path=str(folder), **SMALL)
    first = config.build().videos("train")
    assert len(looked) == 7
    assert config.build().videos("train") == first
    assert len(looked) == 7
    (folder / "train0.mp4").write_bytes((folder / "train1.mp4").read_bytes())
    assert config.build().videos("train")[0].info.n_frames == 10
    assert len(looked) == 14


# --- the configuration ---


def test_held_out_videos(make_folder):
    folder = make_folder()
    (folder / "valid.csv").unlink()
    with pytest.raises(ValueError, match=r"split is 'valid'; expected a split of .* \(train, test\): set"):
        VideoConfig(path=str(folder), **SMALL).build().source("valid")
    splits = {}
    for seed in range(6):
        data = VideoConfig(path=str(folder), **SMALL, valid_share=0.5, seed=seed).build()
        held, rest = data.videos("valid"), data.videos("train")
        assert sorted(video.label for video in held) == [0, 1, 2]  # of 3, 2 and 2 videos
        assert {video.path for video in held}.isdisjoint(video.path for video in rest)
        assert len(held) + len(rest) == 7
        splits[seed] = tuple(video.path.name for video in held)
    assert len(set(splits.values())) > 1
    again = VideoConfig(path=str(folder), **SMALL, valid_share=0.5, seed=2).build().videos("valid")
    assert tuple(video.path.name for video in again) == splits[2]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layout", "zip", "layout is 'zip'; expected one of csv, folders, smarthome"),
        ("n_frames", 0, "n_frames is .*; expected at least 1"),
        ("workers", -1, "workers is .*; expected at least 0"),
        ("frame_rate", 0.0, "frame_rate is .*; expected a finite number above 0"),
        ("scale_jitter", (200, 300), r"scale_jitter\[0\] is 200; expected at least 224"),
        ("valid_share", 1.0, r"valid_share is 1\.0; expected a share"),
        ("label_segments", "first", "label_segments is 'first'; expected one of"),
    ],
)
def test_bad_values(field, value, message, no_type_checker):
    with pytest.raises(ValueError, match=rf"^data\.{message}"):
        VideoConfig(path="x", **{field: value})
