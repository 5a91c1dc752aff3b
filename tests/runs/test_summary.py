import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.summaries import TEXT

from recurra.files.digests import stamped
from recurra.runs.summary import (
    Summary,
    SummaryError,
    read_summaries,
    read_summary,
    rounded,
    thinned_curve,
    write_summary,
)


def rows(n_rows, valid_every):
    """A log: a training loss in every row but those of a validation alone, every second one of which has both."""
    made = []
    for step in range(1, n_rows + 1):
        validated = step % valid_every == 0
        alone = validated and (step // valid_every) % 2 == 0
        made.append(
            {
                "step": step,
                "epoch": step // 7 + 1,
                "train_loss": None if alone else 1 / step,
                "valid_loss": 2 / step if validated else None,
                "valid_accuracy": None,
                "seconds": 1.0,
            }
        )
    return made


@given(st.integers(0, 300), st.integers(1, 90), st.integers(2, 40))
def test_a_thinned_curve_keeps_validations_and_the_ends_and_is_small(n_rows, valid_every, at_most):
    curve = thinned_curve(rows(n_rows, valid_every), at_most)
    if not n_rows:
        assert curve == {}
        return
    validated = [step for step in range(1, n_rows + 1) if step % valid_every == 0]
    others = [step for step in range(1, n_rows + 1) if step % valid_every]
    kept = [step for step in curve["step"] if step % valid_every]
    assert [step for step in curve["step"] if step % valid_every == 0] == validated
    assert len(kept) == min(len(others), at_most)
    assert kept == sorted(set(kept))
    if others:
        assert (kept[0], kept[-1]) == (others[0], others[-1])
    assert "valid_accuracy" not in curve
    for place, step in enumerate(curve["step"]):
        loss = curve["train_loss"][place] if "train_loss" in curve else None
        assert loss in (None, 1 / step)
        if "valid_loss" in curve:
            assert curve["valid_loss"][place] == (2 / step if step in validated else None)


def test_what_is_kept_lies_evenly():
    kept = thinned_curve(rows(1001, 2000), 101)["step"]
    assert kept == list(range(1, 1002, 10))


def test_a_curve_of_one_point_is_refused():
    with pytest.raises(ValueError, match="at_most is 1; expected at least 2"):
        thinned_curve([], 1)


def test_numbers_are_rounded_but_whole_ones_and_the_configuration_are_not(tmp_path, make_summary):
    config = {**TEXT, "optimizer": {"learning_rate": 0.123456789}}
    path = write_summary(tmp_path, make_summary("x", config, seconds=1234.56789, count=123456789))
    plain = json.loads(path.read_text())
    assert (plain["seconds"], plain["count"]) == (1234.57, 123456789)
    assert plain["config"]["optimizer"]["learning_rate"] == 0.123456789
    assert rounded({"a": [1 / 3, math.inf, math.nan, 10**9, "x", True]}) == {
        "a": [0.333333, None, None, 10**9, "x", True]
    }


def test_what_was_written_is_read(tmp_path, make_summary):
    summary = make_summary(spans={"n_correct": [1, 2], "counts": [3, 4]}, hardware={"cores": 2, "gpu": None})
    path = write_summary(tmp_path, summary)
    assert path == tmp_path / "a-run.json"
    assert read_summary(path) == summary
    write_summary(tmp_path, replace(summary, steps=41))
    write_summary(tmp_path, replace(summary, name="b"))
    assert [(other.name, other.steps) for other in read_summaries(tmp_path)] == [("a-run", 41), ("b", 40)]
    assert read_summaries(tmp_path / "nothing") == []


def test_lists_stand_on_one_line(tmp_path, make_summary):
    text = write_summary(tmp_path, make_summary()).read_text()
    assert '\n    "step": [10, 20, 30],\n' in text
    assert text.endswith("}\n")


def without_stamp(text, old, new):
    """A changed summary, with the digest of what it has now."""
    assert old in text
    return json.dumps(stamped(json.loads(text.replace(old, new))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:100], "not readable as JSON"),
        (lambda text: "[]", "a list; expected a JSON object"),
        (lambda text: text.replace('"format": 1', '"format": 7'), "is 7; expected 1"),
        (lambda text: text.replace("1234", "1235"), "is damaged: its content does not have its digest"),
        (lambda text: without_stamp(text, '"steps"', '"stops"'), "these keys are missing or unknown: steps, stops"),
        (lambda text: without_stamp(text, "a-run", "b-run"), "of a run named 'b-run'"),
        (lambda text: without_stamp(text, "1234", '"1234"'), "parameters is a str; expected a whole number"),
        (lambda text: without_stamp(text, "memory-horizon", "horizon"), "config.experiment is 'horizon'; expected one"),
        (
            lambda text: without_stamp(text, "[10, 20, 30]", "[10, 20]"),
            r"curve is \[2, 3, 3\]; expected columns",
        ),
        (lambda text: without_stamp(text, '"loss": 2.0', '"loss": NaN'), "NaN is no JSON"),
    ],
)
def test_what_is_no_summary_is_refused_by_name(tmp_path, make_summary, change, message):
    path = write_summary(tmp_path, make_summary())
    path.write_text(change(path.read_text()))
    with pytest.raises(SummaryError, match=message) as raised:
        read_summaries(tmp_path)
    assert str(path) in str(raised.value)


def test_what_a_summary_says_of_itself(make_summary):
    run: Summary = make_summary("x", TEXT)
    assert (run.seed, run.precision, run.speed) == (3, "32-true", 100.0)
    assert math.isnan(make_summary(seconds=0.0).speed)
    assert (run.value("model.n_layer"), run.value("model.n_layer.x"), run.value("nothing.x")) == (2, None, None)
    assert (run.score("perplexity"), run.score("loss"), run.score("loss", "eval-test-x")) == (61.04, None, None)
    assert run.valid_perplexity == math.exp(2.0)
    assert make_summary(validation={}).valid_perplexity is None


def test_rows_have_what_was_measured_and_a_texts_perplexity(make_summary):
    expected = [{"step": 10, "train_loss": 3.0}, {"step": 20, "valid_loss": 2.5}]
    assert make_summary().rows()[:2] == expected
    expected[1]["valid_perplexity"] = math.exp(2.5)
    assert make_summary("x", TEXT).rows()[:2] == expected


def test_a_run_that_diverged_has_an_infinite_perplexity(tmp_path, make_summary):
    curve = {"step": [10, 20], "train_loss": [3.0, None], "valid_loss": [None, 2e9]}
    diverged = make_summary("x", TEXT, curve=curve, validation={"best": {"step": 20, "loss": 2e9}})
    run = read_summary(write_summary(tmp_path, diverged))
    assert (run.valid_perplexity, run.rows()[1]["valid_perplexity"]) == (math.inf, math.inf)
