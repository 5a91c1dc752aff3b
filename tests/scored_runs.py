"""Two small runs that were trained and scored, for tests of figures and gradients."""

from pathlib import Path

import pytest
from tests.cli.conftest import RECIPE

from recurra.cli import main

HORIZON = RECIPE.replace("resets_per_sample: 2", "resets_per_sample: 2, modulus: 7").replace(
    "threads: 1", "threads: 1, monitor: accuracy"
)
FAMILY = """
common:
  data: {path: data/toy, batch_size: 2, segment_length: 4, bptt_segments: 2}
  model: {n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}
  training: {max_steps: 4, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}
axes:
  model:
    xl: {experiment: text-transformer-xl}
    crt: {experiment: text-crt}
"""


@pytest.fixture(scope="session")
def scored(tmp_path_factory) -> Path:
    """A folder with recipes and two finished, scored runs: runs/horizon and runs/toy-crt."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "recipes" / "toy").mkdir(parents=True)
    (folder / "recipes" / "toy" / "horizon.yaml").write_text(HORIZON)
    fixed = HORIZON.replace("transition: data", "transition: fixed").replace("n_layer: 2", "n_layer: 1")
    (folder / "recipes" / "toy" / "fixed.yaml").write_text(fixed)
    (folder / "recipes" / "toy" / "family.yaml").write_text(FAMILY)
    (folder / "corpus").mkdir()
    for split, n_lines in (("train", 12), ("valid", 3), ("test", 4)):
        (folder / "corpus" / f"{split}.txt").write_text(" the cat sat on a mat \n" * n_lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        faster = ["--optimizer.learning_rate", "0.01"]
        assert main(["train", "recipes/toy/horizon.yaml", "--run-dir", "runs/horizon", *faster]) == 0
        words = ["recipes/toy/family.yaml#crt", "--data.path", str(folder / "corpus")]
        assert main(["train", *words]) == 0
        for run in ("runs/horizon", "runs/toy-crt"):
            assert main(["eval", run]) == 0
        assert main(["eval", "runs/toy-crt", "--data.segment_length", "2"]) == 0
    return folder
