"""Put the model of a run into the package, as NAME, which every command takes in place of a run's folder.

recurra train demo/data-controlled --training.threads 1 --training.precision 32-true --run-dir runs/shipped
recurra eval runs/shipped
python -m tools.pretrained runs/shipped memory-horizon

recurra train books#gateloop --data.path FOLDER
recurra eval runs/books-gateloop
python -m tools.pretrained runs/books-gateloop books --int8 --data.path data/books

Writes NAME.safetensors and the model's entry in index.json, which `recurra models` prints. Values of the recipe, such
as the path above, replace those of the run. The card, NAME.md, is written by hand.
"""

import argparse
from pathlib import Path
from typing import Any

from recurra import open_run
from recurra._files.reading import read_json
from recurra._files.writing import write_json
from recurra.convert.portable import PortableModel, save_single_file
from recurra.train.experiment import to_plain
from recurra.train.run import Run
from recurra.train.shipped import shipped_file

DATA = {"memory-horizon": "generated sequences of numbers", "books": "public-domain books (12 MB)"}
"""What each model was trained on, in a few words."""


def main() -> None:
    """Write the weights, the tokenizer and the experiment of the run's best checkpoint as one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name", choices=DATA)
    parser.add_argument("--int8", action="store_true", help="round the matrices to 8-bit integers")
    parser.add_argument("--checkpoint", default="best")
    arguments, overrides = parser.parse_known_args()
    run = open_run(arguments.run.absolute(), checkpoint=arguments.checkpoint, overrides=overrides)
    tokenizer = run.tokenizer if run.task.has_tokenizer() else None
    file = shipped_file(arguments.name)
    save_single_file(PortableModel(run.model, tokenizer, to_plain(run.experiment), run.step), file, int8=arguments.int8)
    index = file.with_name("index.json")
    entries = read_json(index) | {arguments.name: entry(run, arguments.name, file)}
    write_json(index, dict(sorted(entries.items())))
    print(f"{file}: {file.stat().st_size:,} bytes")


def entry(run: Run, name: str, file: Path) -> dict[str, Any]:
    """Describe a model for index.json; the score is that of the run on its test split."""
    scores: dict[str, Any] = next(score for key, score in run.scores.items() if key.startswith("test"))
    score = "perplexity" if "perplexity" in scores else "accuracy"
    return {
        "mixer": run.experiment.model.mixer,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "bytes": file.stat().st_size,
        "data": DATA[name],
        "score": f"test {score} {scores[score]:.3g}",
    }


if __name__ == "__main__":
    main()
