import matplotlib.image
import numpy as np
import pytest
from tests.summaries import COST, HORIZON, TEXT
from tools.pages.results.figures import RunFigures, short_names
from tools.pages.results.tables import TEST_LENGTHS, lengths_table

from tools.pages.results import figures

EVALUATED = ("eval_min_length", "eval_max_length")


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """The figures as they are given to be saved, by name."""
    seen = {}

    def save(figure, folder, name, **options):
        seen[name] = figure
        return folder / name

    monkeypatch.setattr("tools.pages.figures.save_png", save)
    return seen


SPANS = {"n_correct": [40, 30, 0], "counts": [40, 40, 20]}
GATES = {"layers": [0, 2], "resets": [1], "means": [[0.9, 0.1, 0.8], [0.7, 0.2, 0.6]]}


def test_curves_have_short_names_and_ticks_where_a_run_was_resumed(tmp_path, make_summary, drawn):
    runs = [make_summary("ptb-a-n5", TEXT, resumed_at=[10, 25]), make_summary("ptb-b-n5", TEXT)]
    line = RunFigures(tmp_path).curves(runs, "the-curves", "Curves")
    assert line == "![Curves](figures/the-curves.png)"
    loss, perplexity = drawn["the-curves"].axes
    assert [axes.get_title(loc="left") for axes in (loss, perplexity)] == [
        "loss (nats per target)",
        "validation perplexity",
    ]
    ticks = [line for line in loss.lines if line.get_marker() == "|"]
    assert [list(line.get_xdata()) for line in ticks] == [[10, 25]]
    names = [text.get_text() for text in drawn["the-curves"].legends[0].get_texts()]
    assert names == ["a-n5", "b-n5", "resumed"]
    np.testing.assert_allclose(perplexity.lines[0].get_ydata(), np.exp([2.5, 2.0]))


def test_chosen_panels(tmp_path, make_summary, drawn):
    RunFigures(tmp_path).curves([make_summary()], "x", "X", panels={"Only": ["train_loss"]})
    assert [axes.get_title(loc="left") for axes in drawn["x"].axes] == ["Only"]


def test_spans_are_what_was_counted_and_chance_is_the_tasks(tmp_path, make_summary, drawn, monkeypatch):
    monkeypatch.setattr(figures, "SMOOTHING", 1)
    RunFigures(tmp_path).spans([make_summary(spans=SPANS)], "x", "X")
    curve, chance = drawn["x"].axes[0].lines
    assert list(curve.get_xdata()) == [0, 1, 2]
    assert list(curve.get_ydata()) == [1.0, 0.75, 0.0]
    assert curve.get_label() == "a-run (overall 0.70)"
    assert list(chance.get_ydata()) == [1 / 51] * 2


def task_run(make_summary, name, accuracies):
    config = {**HORIZON, "experiment": "induction", "data": {"max_length": 256} | dict.fromkeys(EVALUATED, 256)}
    scores = {
        f"eval-test-{length}": {
            "accuracy": accuracy,
            "changes": {} if length == 256 else dict.fromkeys(TEST_LENGTHS, length),
        }
        for length, accuracy in accuracies.items()
    }
    return make_summary(name, config, scores=scores)


def test_lengths_are_those_that_the_scores_were_measured_at(tmp_path, make_summary, drawn):
    runs = [
        task_run(make_summary, "induction-gru", {1024: 0.5, 256: 1.0}),
        task_run(make_summary, "induction-lru", {256: 0.9}),
    ]
    runs[1].scores["eval-test-range"] = {"accuracy": 0.7, "changes": {TEST_LENGTHS[0]: 40}}  # 40 to 256: no length
    assert RunFigures(tmp_path).lengths(runs, "x", "X") == "![X](figures/x.png)"
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in drawn["x"].axes[0].lines}
    assert lines["gru"] == [[256, 1.0], [1024, 0.5]]
    assert lines["lru"] == [[256, 0.9]]
    assert lengths_table(runs).splitlines() == [
        "| run | 256 | 1,024 |",
        "|---|---|---|",
        "| induction-gru | 100.0 | 50.0 |",
        "| induction-lru | 90.0 | - |",
    ]
    assert lengths_table(runs[::-1], best_first=True) == lengths_table(runs)
    with pytest.raises(ValueError, match="run is bare, without scores by length; expected a scored run on"):
        RunFigures(tmp_path).lengths([make_summary("bare", scores={})], "x", "X")


def test_gates_are_drawn_with_their_resets(tmp_path, make_summary, drawn):
    RunFigures(tmp_path).gates(make_summary(gates=GATES), "x", "X")
    by_layer, total = drawn["x"].axes[:2]
    np.testing.assert_allclose(by_layer.images[0].get_array(), np.array(GATES["means"], np.float32))
    assert [label.get_text() for label in by_layer.get_yticklabels()] == ["0", "2"]
    assert list(by_layer.lines[0].get_xdata()) == [1]
    np.testing.assert_allclose(total.lines[-1].get_ydata(), [0.8, 0.15, 0.7], rtol=1e-6)


def test_a_point_for_each_run_a_curve_for_each_kind_depth_and_length(tmp_path, make_summary, drawn):
    other = {**COST, "segment_length": 9, "measured": {"block_flops": 6_000_000}}
    runs = [make_summary("a", TEXT, cost=COST), make_summary("b", TEXT, cost=other)]
    RunFigures(tmp_path).perplexity_over_flops(runs, "one", "X")
    (line,) = drawn["one"].axes[0].lines
    assert line.get_xydata().tolist() == [[0.004, 61.04], [0.006, 61.04]]
    assert line.get_label() == "CRT-GRU"
    runs += [make_summary("c", TEXT, cost={**COST, "n_layer": 3}), make_summary("d", TEXT, cost=COST, epochs=2.0)]
    RunFigures(tmp_path).perplexity_over_flops(runs, "more", "X")
    assert [line.get_label() for line in drawn["more"].axes[0].lines] == [
        "CRT-GRU, 2 layers, 4 epochs",
        "CRT-GRU, 3 layers, 4 epochs",
        "CRT-GRU, 2 layers, 2 epochs",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, run: f.curves([], "x", "X"), "runs is empty; expected at least one"),
        (lambda f, run: f.perplexity_over_flops([], "x", "X"), "runs is empty; expected at least one"),
        (lambda f, run: f.spans([run], "x", "X"), "a-run, which has no memory spans"),
        (
            lambda f, run: f.gates(run, "x", "X"),
            "a-run, which has no gates that depend",
        ),
        (lambda f, run: f.perplexity_over_flops([run], "x", "X"), "a-run, which has no counted FLOPs"),
    ],
)
def test_what_a_run_does_not_have_is_not_drawn(tmp_path, make_summary, call, message):
    with pytest.raises(ValueError, match=message):
        call(RunFigures(tmp_path), make_summary())
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_score_is_named(tmp_path, make_summary):
    with pytest.raises(ValueError, match="x, which has no test perplexity"):
        RunFigures(tmp_path).perplexity_over_flops([make_summary("x", TEXT, cost=COST, scores={})], "x", "X")


def test_the_same_summaries_give_the_same_file_and_none_without_a_folder(tmp_path, make_summary):
    run = make_summary(spans=SPANS, gates=GATES)
    files = []
    for folder in ("one", "two"):
        drawing = RunFigures(tmp_path / folder)
        drawing.gates(run, "gates", "X")
        assert drawing.written == [tmp_path / folder / "gates.png"]
        files.append((tmp_path / folder / "gates.png").read_bytes())
    assert files[0] == files[1]
    assert matplotlib.image.imread(tmp_path / "one" / "gates.png").std() > 0.05
    nowhere = RunFigures(None)
    assert nowhere.gates(run, "gates", "X") == "![X](figures/gates.png)"
    assert nowhere.written == []


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a-b-c"], ["a-b-c"]),
        (["a-b-c", "a-b-d-e"], ["c", "d-e"]),
        (["a-b", "a-b-c"], ["b", "b-c"]),
        (["ab-x", "ac-x"], ["ab-x", "ac-x"]),
        (["a", "a-b"], ["a", "a-b"]),
    ],
)
def test_legends_leave_out_the_words_that_all_names_begin_with(make_summary, names, short):
    assert list(short_names([make_summary(name) for name in names]).values()) == short


def test_runs_with_other_moduli_have_no_chance_in_common(tmp_path, make_summary, drawn):
    other = {**HORIZON, "data": {"modulus": 7}}
    RunFigures(tmp_path).spans([make_summary("a", spans=SPANS), make_summary("b", other, spans=SPANS)], "x", "X")
    assert len(drawn["x"].axes[0].lines) == 2
