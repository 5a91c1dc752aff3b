"""Small trained runs of each kind, shared by the tests of a session."""

from pathlib import Path

import pytest
from tests.scored_runs import scored  # noqa: F401
from tests.small_figures import dots_per_inch, small_figures, unrendered_figures  # noqa: F401

from recurra.cli import main

TEXT = " the cat sat on a mat \n"
TRAINING = "training: {max_steps: 2, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}"
RECIPES = {
    "text": f"""
experiment: text
data: {{path: corpus, batch_size: 2, segment_length: 4}}
model: {{n_layer: 1, d_model: 8, mixer_options: {{d_qk: 8, d_v: 8, n_heads: 8}}}}
{TRAINING}
""",
    "horizon": f"""
experiment: memory-horizon
data: {{n_samples: 40, sequence_length: 24, batch_size: 8, resets_per_sample: 2, modulus: 7}}
model: {{n_layer: 1, d_model: 8, d_channel_mixing: 16, mixer_options: {{d_qk: 8, d_v: 8, n_heads: 8}}}}
{TRAINING}
""",
    "video": f"""
experiment: motions-timesformer
data: {{path: videos, n_videos: 20, n_motions: 2, frames_per_motion: 3, image_size: 16, n_frames: 3, batch_size: 8,
        workers: 0}}
model: {{patch_size: 8, n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}}
{TRAINING}
""",
}


@pytest.fixture(autouse=True)
def _threads(set_threads):
    """Runs set the number of threads."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with a corpus, videos, and a finished run of each recipe in runs/NAME."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "corpus").mkdir()
    for split, n_lines in (("train", 12), ("valid", 3), ("test", 4)):
        (folder / "corpus" / f"{split}.txt").write_text(TEXT * n_lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, recipe in RECIPES.items():
            Path(f"{name}.yaml").write_text(recipe)
            assert main(["train", f"{name}.yaml", "--run-dir", f"runs/{name}"]) == 0
    return folder


@pytest.fixture
def there(monkeypatch, trained) -> Path:
    """The same folder, as the working folder."""
    monkeypatch.chdir(trained)
    return trained
