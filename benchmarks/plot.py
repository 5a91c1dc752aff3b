"""Draw the figures of speed, memory and faults: python benchmarks/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

HERE = Path(__file__).parent
RESULTS = json.loads((HERE / "results.json").read_text())


def _found(name: str) -> dict:
    return {key: value for key, value in RESULTS[name].items() if key != "measured"}


def _bars(axes: plt.Axes, values: dict[str, float], **look: object) -> None:
    axes.bar_label(axes.barh(list(values), list(values.values()), **look), fmt="%.2f", padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def speed() -> plt.Figure:
    figure, (scan, mixers) = plt.subplots(1, 2, figsize=(9, 4.8))
    found = _found("scan_over_torch_add")
    rows = {
        f"{shape}, {kind}": value
        for kind in ("float32", "complex64")
        for shape, value in zip(found["shapes"], found[kind])
    }
    _bars(scan, rows)
    scan.axvline(1, color="grey", linewidth=1)
    scan.set_title("a  linear_scan, time over torch.add's")
    ratios = {mixer: row["over_transformer_of_its_size"] for mixer, row in _found("mixers").items()}
    _bars(mixers, dict(sorted(ratios.items(), key=lambda row: -row[1])), color="C2")
    mixers.axvline(1, color="grey", linewidth=1)
    mixers.tick_params(axis="y", labelsize=6)
    mixers.set_title("b  Tokens/s over an equal Transformer's")
    return figure


def decoding() -> plt.Figure:
    figure, (token, server) = plt.subplots(1, 2, figsize=(9, 3.2))
    _bars(token, _found("decoding_milliseconds"), color=["C0"] * 4 + ["C1"] * 3)
    token.set_title("a  One stream: ms per token, less is better")
    sides = {"C0": "Recurra: GateLoop (88M)", "C1": "transformers: GPT-2 (124M), float32"}
    token.legend(handles=[Patch(color=color, label=label) for color, label in sides.items()], loc="upper right")
    found = _found("serving_tokens_per_second")
    for number, name in enumerate(name for name in found if name != "streams"):
        bars = server.bar([place + 0.4 * number for place in range(3)], found[name], 0.38, label=name)
        server.bar_label(bars, fontsize=7)
    server.set_xticks([0.2, 1.2, 2.2], [f"{n} stream{'s' * (n > 1)}" for n in found["streams"]])
    server.set_title("b  A server: tokens/s, more is better")
    server.legend(loc="upper left")
    return figure


def gpu() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8, 3.2))
    _bars(axes, {name: times[1] for name, times in _found("gpu_milliseconds_forward_and_with_gradients").items()})
    axes.set_title("Milliseconds of a call with gradients on an H200, launches included")
    return figure


def faults() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8, 4.4))
    columns, *rows = _found("mutants").items()
    left = [0] * len(rows)
    for number, column in enumerate(columns[1][1:], 1):
        shares = [100 * counts[number] / counts[0] for _, counts in rows]
        axes.barh([name for name, _ in rows], shares, left=left, label=column)
        left = [start + share for start, share in zip(left, shares)]
    axes.invert_yaxis()
    axes.set(title="What became of 2,000 damaged copies of each kind of file, per cent", xlim=(0, 100))
    axes.tick_params(axis="y", labelsize=7)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "docs" / "figures"
    with plt.style.context(HERE.parent / "recipes" / "figures.mplstyle"):
        for draw in (speed, decoding, gpu, faults):
            draw().savefig(folder / f"{draw.__name__}.png")
