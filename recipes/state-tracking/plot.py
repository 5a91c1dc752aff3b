"""Draw state tracking: python recipes/state-tracking/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RUNS = json.loads((HERE / "results.json").read_text())["runs"]
TASKS = {
    "parity": ("a  Parity", 0.5),
    "arithmetic": ("b  Arithmetic modulo 5", 0.2),
    "a5": ("c  Words over A5", 1 / 60),
}
COLOURS = {
    "gateloop": "C0",
    "gru": "C1",
    "slstm": "C2",
    "gated-delta-net": "C3",
    "delta-net": "C4",
    "mamba3": "C5",
    "mamba": "C6",
}


def _colour(run: str) -> str:
    return COLOURS[max((mixer for mixer in COLOURS if run.startswith(mixer)), key=len)]


def accuracy_over_length() -> plt.Figure:
    """Draw test accuracy over the length of a sequence, for runs that were scored at three lengths or more."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 4.2))
    for axes, (task, (title, chance)) in zip(panels, TASKS.items()):
        for run, found in RUNS.items():
            curve = found.get("test_accuracy_by_length", {})
            if f"-{task}" not in run or "-seed-" in run or len(curve) < 2:
                continue
            later = any(word in run for word in ("by-loss", "-160", "default-start"))
            lengths = [int(length) for length in curve]
            axes.plot(
                lengths,
                list(curve.values()),
                "o:" if run.endswith("-zero") else "o--" if later else "o-",
                color=_colour(run),
                label=run.replace(f"-{task}", ""),
            )
        axes.axhline(chance, color="grey", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="tokens", ylim=(-0.02, 1.03))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7, handlelength=3)
    panels[0].set_ylabel("test accuracy (grey line: chance)")
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures"
    with plt.style.context(HERE.parent / "figures.mplstyle"):
        accuracy_over_length().savefig(folder / "state-tracking.png")
