"""The panels that have something to show."""

from recurra.analysis.plots.curves import measured_panels

ROWS = [{"step": "1", "train_loss": "3.0", "valid_loss": ""}, {"step": "9", "train_loss": "2.0", "valid_loss": "2.5"}]


def test_panels_of_what_no_run_measured_are_left_out():
    assert list(measured_panels({"a": ROWS})) == ["loss (nats per target)"]
    more = [{"step": 1, "valid_accuracy": 0.0, "valid_perplexity": ""}]
    assert list(measured_panels({"a": ROWS, "b": more})) == ["loss (nats per target)", "validation accuracy"]
