"""Draw the results on Penn Treebank: python recipes/ptb/plot.py [FOLDER]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = json.loads((HERE / "results.json").read_text())
RUNS, PUBLISHED = RESULTS["runs"], RESULTS["published"]
MODELS = {
    "transformer": "Transformer",
    "transformer-xl": "Transformer-XL",
    "crt-gru": "CRT-GRU",
    "crt-ncgru": "CRT-NCGRU",
}
LENGTHS = (17, 35, 70)


def perplexity() -> plt.Figure:
    """Draw the 40-epoch runs over epochs, and test perplexity over the length of a segment beside the published one."""
    figure, (over_epochs, over_length) = plt.subplots(1, 2, figsize=(9, 3.6))
    for number, (model, label) in enumerate(MODELS.items()):
        run, colour = f"{model}-n70-40-epochs", f"C{number}"
        curve, share = RESULTS["curves"][run], 40 / RUNS[run]["updates"]
        over_epochs.plot([share * update for update in curve["update"]], curve["valid_perplexity"], color=colour)
        ours = [RUNS[f"{model}-n{n}-8-epochs"]["test_perplexity"] for n in LENGTHS]
        theirs = [PUBLISHED[f"{model}-3-layers-n{n}"]["test_perplexity"] for n in LENGTHS]
        over_length.plot(LENGTHS, ours, "o-", color=colour, label=label)
        over_length.plot(LENGTHS, theirs, "o--", color=colour, mfc="white")
        longer = {n: RUNS.get(f"{model}-n{n}-40-epochs") for n in LENGTHS}
        over_length.plot(
            [n for n in LENGTHS if longer[n]],
            [longer[n]["test_perplexity"] for n in LENGTHS if longer[n]],
            "s",
            color=colour,
            markersize=6,
        )
    curve = RESULTS["curves"]["crt-gru-n17-40-epochs"]
    share = 40 / RUNS["crt-gru-n17-40-epochs"]["updates"]
    over_epochs.plot(
        [share * update for update in curve["update"]],
        curve["valid_perplexity"],
        ":",
        color="C2",
        label="CRT-GRU, n = 17",
    )
    over_epochs.set(xlabel="epoch", ylim=(70, 200), title="a  Validation perplexity, 40 epochs, n = 70")
    over_length.set(xlabel="n, tokens in a segment", xticks=LENGTHS, title="b  Test perplexity")
    over_length.annotate(
        "8 epochs (line), 40 epochs (square),\npublished (dashed)",
        (0.98, 0.98),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8,
        color="grey",
    )
    figure.legend(loc="outside lower center", ncols=5)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures"
    with plt.style.context(HERE.parent / "figures.mplstyle"):
        perplexity().savefig(folder / "ptb.png")
