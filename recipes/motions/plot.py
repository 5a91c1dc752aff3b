"""Draw the generated motions: python recipes/motions/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = json.loads((HERE / "results.json").read_text())
LABELS = {
    "timesformer": "TimeSformer,\nsingle segments",
    "crvit": "CR-ViT, from that\nTimeSformer",
    "crvit-scratch": "CR-ViT, from\nfresh weights",
}


def accuracy() -> plt.Figure:
    """Draw mean class accuracies, and the confusion matrix of the model of single segments."""
    figure, (bars, matrix) = plt.subplots(1, 2, figsize=(9, 3.4))
    drawn = bars.bar(list(LABELS.values()), [RESULTS["runs"][run]["test_mean_class_accuracy"] for run in LABELS])
    bars.bar_label(drawn, fmt="%.3f")
    bars.axhline(0.25, color="grey", linewidth=1)
    bars.set(title="a  Mean class accuracy, test (grey: chance)", ylim=(0, 1.1))
    bars.grid(axis="x", visible=False)
    confusion, classes = RESULTS["confusion"]["timesformer"], RESULTS["confusion"]["classes"]
    matrix.imshow(confusion, cmap="Blues")
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            matrix.text(column, row, count, ha="center", va="center", color="white" if count > 40 else "black")
    matrix.set_xticks(range(4), classes, rotation=30, ha="right")
    matrix.set_yticks(range(4), classes)
    matrix.grid(visible=False)
    matrix.set(title="b  TimeSformer: videos by true (rows)\nand predicted class", xlabel="predicted")
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures"
    with plt.style.context(HERE.parent / "figures.mplstyle"):
        accuracy().savefig(folder / "motions.png")
