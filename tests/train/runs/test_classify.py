"""A video run applied to videos."""

from pathlib import Path

import pytest
import torch

from recurra.train.run import open_run
from recurra.video.reader import VideoFile
from recurra.video.task import _MAX_FRAMES, _MAX_SEGMENTS, ContactSheet, classify_video, classify_videos


def test_the_last_segment_of_a_test_video_is_what_its_scores_are_from(there):
    """The same frames, state and view as in an evaluation."""
    run = open_run("runs/video")
    expected = classify_videos(run.model, run.data.views("test")).probabilities
    for checked, probabilities in zip(run.data.videos("test"), expected, strict=True):
        *_, last = classify_video(run, checked.path)
        torch.testing.assert_close(last.probabilities, probabilities.to(last.probabilities), atol=1e-5, rtol=0)


def test_the_rate_is_that_of_training_unless_given(there):
    run, path = open_run("runs/video"), Path("videos/videos/000000.mp4")
    with VideoFile(path) as file:
        duration = file.probe().duration
    data = run.experiment.data
    assert len(list(classify_video(run, path))) == data.n_segments
    predictions = list(classify_video(run, path, rate=2 * data.n_segments * data.n_frames / duration))
    assert len(predictions) == 2 * data.n_segments
    assert predictions[-1].end == pytest.approx(duration)


def test_a_duration_that_is_rounded_down_makes_no_segment_of_its_own(there, monkeypatch):
    """As that of a Matroska file is, to milliseconds."""
    run, path, probe = open_run("runs/video"), Path("videos/videos/000000.mp4"), VideoFile.probe

    def rounded(file):
        video = probe(file)
        return video._replace(duration=video.duration - 0.002)

    monkeypatch.setattr(VideoFile, "probe", rounded)
    assert len(list(classify_video(run, path))) == run.experiment.data.n_segments


def test_a_long_stream_keeps_a_bounded_number_of_frames(there, tmp_path):
    run, path, rate = open_run("runs/video"), Path("videos/videos/000000.mp4"), 400.0
    sheet = ContactSheet(run.class_names)
    predictions = list(classify_video(run, path, rate=rate, sheet=sheet))
    with VideoFile(path) as file:
        assert len(sheet.frames.items) <= _MAX_FRAMES < rate * file.probe().duration
    times = [time for time, _ in sheet.frames.items]
    assert times == pytest.approx([sheet.frames.stride / rate * place for place in range(len(times))])
    assert len(sheet.segments.items) == len(predictions) <= _MAX_SEGMENTS
    assert sheet.draw(tmp_path, "sheet") == tmp_path / "sheet.png"
    assert (tmp_path / "sheet.png").stat().st_size > 1000
