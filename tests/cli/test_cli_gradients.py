"""`recurra gradients` from outside: runs in, tables, numbers and a figure out."""

import json
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import failure, write_corpus

from recurra.analysis.gradient_flow import GradientFlow, measure_gradient_flow
from recurra.cli import main
from recurra.cli.figures import _scientific
from recurra.train.run import Run, open_run

N = 4
RECIPE = """
experiment: {experiment}
data: {{path: {corpus}, batch_size: 2, segment_length: 4, bptt_segments: 2}}
model: {model}
training: {{epochs: 2, log_every: 1, tensorboard: false, accelerator: cpu, threads: 1}}
"""
CRT = "{{n_layer: 1, d_model: 6, n_heads: 2, d_channel_mixing: 9, memory: {0}, position: {1}, dropout: 0.1}}"
MODELS = {
    "gru": ("text-crt", CRT.format("gru", "rnn-gru")),
    "ncgru": ("text-crt", CRT.format("ncgru", "rnn-ncgru")),
    "none": ("text-crt", CRT.format("none", "relative")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """The folders of finished runs, one of each model."""
    folder = tmp_path_factory.mktemp("runs")
    corpus, line = folder / "corpus", " the cat sat on a mat \n"
    write_corpus(corpus, line * 12, " a mat on the cat sat \n" * 3, line * 5)
    for name, (experiment, model) in MODELS.items():
        recipe = folder / f"{name}.yaml"
        recipe.write_text(RECIPE.format(experiment=experiment, corpus=corpus, model=model))
        assert main(["train", str(recipe), "--run-dir", str(folder / name)]) == 0
    return {name: str(folder / name) for name in MODELS}


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    """A console in which no column of a table is folded."""
    monkeypatch.setenv("COLUMNS", "200")


def measured(run: Run, split: str, warm_up: int, segments: int) -> GradientFlow:
    tokens = torch.from_numpy(run.data.tokens(split)[: (warm_up + segments) * N].astype("int64"))[None]
    state = run.model.hidden(tokens[:, : warm_up * N])[1]
    return measure_gradient_flow(run.model, tokens[:, warm_up * N :], state)


def test_numbers_tables_and_figure(capsys, runs):
    assert main(["gradients", runs["gru"], runs["ncgru"], "--segments", "4", "--warm-up", "2"]) == 0
    printed = capsys.readouterr().out
    files = [Path(line) for line in printed.splitlines()[-2:]]
    figures = Path(runs["gru"]).parent / "figures"
    assert files == [figures / "gradient-flow.png", figures / "gradient-flow.svg"]
    assert all(file.stat().st_size > 1000 for file in files)
    rows = [line.replace("│", " ").split()[:4] for line in printed.splitlines()]
    for name in ("gru", "ncgru"):
        run = open_run(runs[name])
        flow = measured(run, "test", warm_up=2, segments=4)
        written = json.loads((Path(runs[name]) / "gradients.json").read_text())
        assert {key: written[key] for key in ("split", "checkpoint", "segments", "warm_up", "step")} == {
            "split": "test",
            "checkpoint": "best",
            "segments": 4,
            "warm_up": 2,
            "step": run.step,
        }
        assert written["sources"] == list(range(3 * N))
        for key in ("total", "direct", "log10_bound", "log10_bound_a_priori"):
            torch.testing.assert_close(torch.tensor(written[key]).double(), getattr(flow, key), rtol=1e-5, atol=0)
        assert written["steps"]["norms"] == pytest.approx(flow.steps.norms.tolist())
        assert f"{float(flow.steps.bounds.max()):.4f}" in printed
        for source in (0, N - 1, N, 3 * N - 1):
            total = _scientific(float(flow.total[0, source].log10()))
            assert [str(3 * N), str(source), str(3 * N - source), total] in rows
    assert "not orthogonal" in printed


def test_what_cannot_be_measured_is_refused(capsys, runs):
    name = "none"
    assert "segments is 1; expected at least 2" in failure(capsys, "gradients", runs["gru"], "--segments", "1")
    assert "expected folders with different names" in failure(capsys, "gradients", runs["gru"], runs["gru"])
    message = failure(capsys, "gradients", runs["gru"], runs[name])
    assert f"run {name}: " in message
    assert "expected one with a memory vector between segments" in message
    assert "`experiment: text-crt` and `model.memory: gru` or `ncgru`" in message
    assert not (Path(runs[name]) / "gradients.json").exists()
