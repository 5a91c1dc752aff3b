"""Draw associative recall: python recipes/recall/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
CURVES = json.loads((HERE / "results.json").read_text())["curves"]
SIZES = {64: "a  4 pairs in 64 tokens", 128: "b  8 pairs in 128", 256: "c  16 pairs in 256"}
MIXERS = (
    "delta-net",
    "gated-delta-net",
    "mamba2",
    "rotary-attention",
    "hgrn2",
    "mamba3",
    "mlstm",
    "gla",
    "gateloop-ring",
)
"""Those that learn the smallest size, and were run on longer sequences; in grey: all others."""


def learning() -> plt.Figure:
    """Draw validation accuracy over updates, a panel for each size; models have 64 channels."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True)
    for axes, (length, title) in zip(panels, SIZES.items()):
        end = f"-d64-n{length}"
        for run, curve in CURVES.items():
            if run.endswith(end) and run.removesuffix(end) not in MIXERS:
                axes.plot(curve["update"], curve["valid_accuracy"], color="lightgrey", linewidth=1)
        for number, mixer in enumerate(MIXERS):
            curve = CURVES.get(mixer + end)
            if curve:
                look = {
                    "color": f"C{number % 7}",
                    "linestyle": "--" if number > 6 else "-",
                    "marker": "." * (len(curve["update"]) < 6),
                }
                axes.plot(curve["update"], curve["valid_accuracy"], label=mixer if length == 64 else None, **look)
        axes.set(title=title, xlabel="update", xlim=(0, 12300), ylim=(-0.02, 1.02))
    panels[0].set_ylabel("validation accuracy")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures"
    with plt.style.context(HERE.parent / "figures.mplstyle"):
        learning().savefig(folder / "recall.png")
