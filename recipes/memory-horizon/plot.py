"""Draw Memory Horizon's results: python recipes/memory-horizon/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = json.loads((HERE / "results.json").read_text())
RUNS = {
    "data-controlled-zero-branches": ("data-controlled, SOAP, zero branches", "C4", "-"),
    "data-controlled-soap": ("data-controlled, SOAP", "C0", "-"),
    "data-controlled-muon": ("data-controlled, Muon", "C1", "-"),
    "data-controlled-ring": ("data-controlled, ring", "C2", "-"),
    "data-controlled": ("data-controlled, as published", "C3", "-"),
    "fixed-zero-branches": ("fixed, SOAP, zero branches", "C4", "--"),
    "fixed-soap": ("fixed, SOAP", "C0", "--"),
    "fixed-muon": ("fixed, Muon", "C1", "--"),
    "fixed": ("fixed, as published", "C3", "--"),
}
"""Solid: data-controlled transitions. Dashed: fixed ones."""


def accuracy() -> plt.Figure:
    """Draw validation accuracy over updates, and test accuracy over the memory span (Figure 7 of GateLoop)."""
    figure, (over_updates, over_span) = plt.subplots(1, 2, figsize=(9, 3.6))
    for run, (label, colour, line) in RUNS.items():
        curve, spans = RESULTS["curves"][run], RESULTS["spans"][run]
        over_updates.plot(curve["update"], curve["valid_accuracy"], line, color=colour, label=label)
        over_span.plot(spans["span"], spans["test_accuracy"], line, color=colour)
    for run, line in (("data-controlled", "-"), ("fixed", "--")):
        over_updates.axhline(RESULTS["published"][run]["test_accuracy"], linestyle=line, color="grey", linewidth=1)
    over_updates.annotate(
        "published, data-controlled", (18900, 0.43), ha="right", va="bottom", color="grey", fontsize=8
    )
    over_updates.annotate("published, fixed", (0, 0.25), va="bottom", color="grey", fontsize=8)
    over_updates.set(xlabel="update", title="a  Validation accuracy", ylim=(0, 0.46))
    over_span.set(xlabel="memory span, in tokens", title="b  Test accuracy over the span", xlim=(0, 160))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def gates() -> plt.Figure:
    """Draw the mean magnitude of each layer's gates over one test sequence (Figure 5 of GateLoop)."""
    found = RESULTS["gates"]
    figure, axes = plt.subplots(figsize=(9, 2.6))
    for layer, means in enumerate(found["mean_magnitude_by_layer"]):
        axes.plot([found["every"] * step for step in range(len(means))], means, linewidth=1, label=f"layer {layer}")
    for step in found["resets"]:
        axes.axvline(step, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="step (dashed: resets)", title="Mean gate magnitude |a|, data-controlled, SOAP", ylim=(0, 1))
    axes.legend(ncols=4, loc="lower left")
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures"
    with plt.style.context(HERE.parent / "figures.mplstyle"):
        accuracy().savefig(folder / "memory-horizon.png")
        gates().savefig(folder / "memory-horizon-gates.png")
