"""Poses beside videos: files, the moments and the view of a clip, and what is missing."""

import json
import math

import numpy as np
import pytest
import torch

from recurra.video.clips import PoseFolder, read_poses
from recurra.video.data import VideoConfig

N_FRAMES, HEIGHT, WIDTH = 12, 32, 48


@pytest.fixture
def data(tmp_path, write_video):
    """Three videos of a bright square on black that moves right; its middle is joint 0, joint 1 was never found."""
    (tmp_path / "poses").mkdir()
    lines = []
    for number in range(3):
        middles = np.array([[10 + 2 * frame, 12 + 3 * number] for frame in range(N_FRAMES)])
        pictures = np.zeros((N_FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
        for picture, (x, y) in zip(pictures, middles):
            picture[y - 3 : y + 3, x - 3 : x + 3] = 255
        write_video(f"{number}.mp4", pictures)
        joints = np.full((N_FRAMES, 2, 2), math.nan)
        joints[:, 0] = middles
        if number == 1:
            plain = [[list(map(float, middle)), [None, None]] for middle in middles]
            (tmp_path / "poses/1.json").write_text(json.dumps({"joints": plain, "features": [1.0, 5.0]}))
        elif number == 0:
            np.savez(tmp_path / "poses/0.npz", joints=joints, features=np.array([[0.0, 1.0], [2.0, 3.0]]))
        lines.append(f"{number}.mp4,{number % 2}\n")
    for split in ("train", "valid"):
        (tmp_path / f"{split}.csv").write_text("".join(lines))
    sizes = {"n_frames": 2, "n_segments": 2, "image_size": 32, "batch_size": 3, "workers": 0}
    config = VideoConfig(path=str(tmp_path), poses=str(tmp_path / "poses"), cache=str(tmp_path / "cache"), **sizes)
    return config.build()


def test_joints_follow_the_moments_scales_crops_and_flips(data):
    with pytest.warns(UserWarning, match="1 of 3 videos have no poses"):
        source = data.source("train")
    mirrored, checked = set(), 0
    for epoch in range(4):
        batch = source.batch(epoch, 0)
        assert batch.poses.joints.shape == (3, 4, 2, 2)
        assert batch.poses.joints[:, :, 1].isnan().all()
        for clip, joints in zip(batch.inputs, batch.poses.joints[:, :, 0]):
            if joints.isnan().any():
                continue
            mirrored.add(bool(joints[-1, 0] < joints[0, 0]))
            for picture, (x, y) in zip(clip.mean(1), joints.tolist()):
                bright = (picture > 0.0).nonzero().double() + 0.5
                if 6 < x < 26 and 6 < y < 26:  # the whole square is seen
                    assert bright.mean(0).tolist() == pytest.approx([y, x], abs=0.6)
                    checked += 1
    assert mirrored == {True, False}
    assert checked > 8


def test_features_are_those_of_the_segment_and_what_has_no_file_is_nan(data):
    with pytest.warns(UserWarning, match="no poses"):
        batch = data.source("train").batch(0, 0)
    rows = {str(row.tolist()) for row in batch.poses.features}
    assert rows == {"[[0.0, 1.0], [2.0, 3.0]]", "[[1.0, 5.0], [1.0, 5.0]]", "[[nan, nan], [nan, nan]]"}


def test_evaluation_needs_no_poses(data, tmp_path):
    (tmp_path / "poses").rename(tmp_path / "elsewhere")
    assert data.source("valid").batch(0, 0).poses is None
    with pytest.raises(FileNotFoundError, match=r"data.poses is .*; expected a folder of pose files"):
        data.source("train")


def test_a_folder_without_poses_is_refused(data, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file for any of 3 videos"):
        PoseFolder(tmp_path / "empty", tmp_path, data.videos("train"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "a file without joints"),
        ({"joints": [[1.0, 2.0]]}, r"of shape \(1, 2\); expected \(frames, joints, 2\)"),
        ({"joints": [[[1.0, "x"]]]}, "not an array of numbers"),
        ({"joints": [[[1.0, 2.0]]], "features": [[[1.0]]]}, r"features of .* is of shape \(1, 1, 1\)"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_poses(tmp_path / "a.json")
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"a\.npz is damaged"):
        read_poses(tmp_path / "a.npz")


def test_damaged_archives_and_arrays_of_objects_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, joints=np.random.default_rng(0).random((50, 17, 2), np.float32))
    content = path.read_bytes()
    path.write_bytes(content[:300] + b"\xff" * 30 + content[330:])
    with pytest.raises(ValueError, match=r"a\.npz is damaged \(.*\); expected an \.npz file of numbers"):
        read_poses(path)
    np.savez(path, joints=np.array([[None]], dtype=object))
    with pytest.raises(ValueError, match=r"a\.npz is damaged \(Object arrays .*\); expected an \.npz file of numbers"):
        read_poses(path)


def test_files_agree_on_their_sizes(data, tmp_path):
    np.savez(tmp_path / "poses/2.npz", joints=np.zeros((3, 5, 2)))
    with pytest.raises(ValueError, match=r"2\.npz is a file of 5 joints and None features; expected as in the other"):
        data.source("train").batch(0, 0)
    assert torch.is_tensor(data.source("valid").batch(0, 0).inputs)


def test_videos_beside_the_folder_are_looked_for_by_name(data, tmp_path):
    with pytest.warns(UserWarning, match="1 of 3 videos have no poses"):
        poses = PoseFolder(tmp_path / "poses", tmp_path / "lists", data.videos("train"))
    expected = tmp_path / "poses/0.npz"
    for video in (tmp_path / "0.mp4", tmp_path / "lists/../0.mp4", tmp_path / "lists/../clips/0.mp4"):
        assert poses.file(video) == expected
    assert poses.file(tmp_path / "lists/clips/0.mp4") is None
