"""Draw induction heads: python recipes/induction/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RUNS = json.loads((HERE / "results.json").read_text())["runs"]
FAR = "16384"
"""Named are the mixers that were scored at this length; the others were at chance before."""


def accuracy_over_length() -> plt.Figure:
    """Draw test accuracy over the length of a sequence, from the trained length on."""
    figure, axes = plt.subplots(figsize=(8, 3.8))
    curves = {
        run: {int(n): value for n, value in found["test_accuracy_by_length"].items()} for run, found in RUNS.items()
    }
    named = sorted(
        (run for run in curves if FAR in RUNS[run]["test_accuracy_by_length"]),
        key=lambda run: -sum(curves[run].values()),
    )
    for run, curve in curves.items():
        if run not in named:
            axes.plot(list(curve), list(curve.values()), color="lightgrey", linewidth=1)
    for number, run in enumerate(named):
        line = ("-", "--", ":")[number // 7]
        axes.plot(list(curves[run]), list(curves[run].values()), line, marker="o", color=f"C{number % 7}", label=run)
    axes.axhline(1 / 16, color="grey", linewidth=1)
    axes.annotate("chance", (256, 1 / 16), va="bottom", color="grey", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens (trained on up to 256)", title="Test accuracy", ylim=(-0.02, 1.05))
    figure.legend(loc="outside right center")
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures"
    with plt.style.context(HERE.parent / "figures.mplstyle"):
        accuracy_over_length().savefig(folder / "induction.png")
