import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recurra.video.clips import FrameSampling
from recurra.video.reader import VideoInfo


def video(duration, n_frames=30):
    return VideoInfo(n_frames, duration, 48, 32)


def test_over_the_whole_video():
    sampling = FrameSampling(4)
    np.testing.assert_allclose(sampling.view(video(8.0)), [1, 3, 5, 7])
    np.testing.assert_allclose(sampling.view(video(8.0), 0, 2), [0.5, 2.5, 4.5, 6.5])
    np.testing.assert_allclose(sampling.view(video(8.0), 1, 2), [1.5, 3.5, 5.5, 7.5])


def test_at_a_rate():
    sampling = FrameSampling(4, rate=2.0)  # 2 s
    np.testing.assert_allclose(sampling.view(video(8.0)), [3.25, 3.75, 4.25, 4.75])
    np.testing.assert_allclose(sampling.view(video(8.0), 0, 3), [0.25, 0.75, 1.25, 1.75])
    np.testing.assert_allclose(sampling.view(video(8.0), 1, 3), sampling.view(video(8.0)))
    np.testing.assert_allclose(sampling.view(video(8.0), 2, 3), [6.25, 6.75, 7.25, 7.75])


def test_a_clip_longer_than_the_video_is_squeezed():
    sampling, random = FrameSampling(4, rate=0.1), np.random.default_rng(0)
    for times in (sampling.view(video(8.0)), sampling.view(video(8.0), 9, 10), sampling.random(video(8.0), random)):
        np.testing.assert_allclose(times, [1, 3, 5, 7])


@given(
    n=st.integers(1, 20),
    duration=st.floats(0.03, 50),
    how=st.sampled_from([{}, {"rate": 3.0}]),
    seed=st.integers(0, 9),
)
def test_times_ascend_inside_the_video(n, duration, how, seed):
    sampling = FrameSampling(n, **how)
    views = [sampling.view(video(duration), view, 3) for view in range(3)]
    for times in (*views, sampling.random(video(duration), np.random.default_rng(seed))):
        assert times.shape == (n,)
        assert (np.diff(times) > 0).all()
        assert times[0] >= 0
        assert times[-1] <= duration


def test_random_clips_are_uniform():
    random = np.random.default_rng(0)
    starts = np.array([FrameSampling(4, rate=2.0).random(video(8.0), random)[0] - 0.25 for _ in range(4000)])
    np.testing.assert_allclose(
        np.quantile(starts, [0.02, 0.25, 0.5, 0.75, 0.98]) / 6, [0.02, 0.25, 0.5, 0.75, 0.98], atol=0.03
    )
    drawn = np.array([FrameSampling(4).random(video(8.0), random) for _ in range(4000)])
    np.testing.assert_allclose(drawn.mean(0), [1, 3, 5, 7], atol=0.05)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(4), atol=0.06)  # each drawn by itself
    assert drawn.min(0).round(1).tolist() == [0, 2, 4, 6]
