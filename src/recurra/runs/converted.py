"""A model from elsewhere as a run: one that can be evaluated and generated from, but not resumed."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from recurra.checks import sentence
from recurra.convert import PortableModel, tokenizer_to_json
from recurra.files.writing import replacing
from recurra.models import entry_of
from recurra.training import CheckpointFolder, Experiment, RunFolder, find_task, load_recipe, to_yaml
from recurra.training.experiment import to_plain
from recurra.training.resumable import Position
from recurra.training.task import experiment_name

UNKNOWN_CORPUS = "unknown"
"""data.path of a run whose corpus is not known."""


def save_run(portable: PortableModel, path: Path, *, target: Path, source: Path) -> None:
    """Write a model as a run.

    Args:
        portable: the model, with its tokenizer.
        path: the folder to write.
        target: where that folder will be.
        source: where the model is from; config.yaml names it.

    Raises:
        ValueError: the model has no tokenizer, or its experiment describes another model.
    """
    if portable.tokenizer is None:
        raise ValueError(sentence("source", f"{source}, which has no tokenizer", "a model with one, as a run has"))
    folder = RunFolder(path)
    with replacing(folder.tokenizer) as file:
        file.write(tokenizer_to_json(portable.tokenizer).encode())
    plain = portable.experiment or _unknown_experiment(portable, target)
    folder.write_config(yaml.safe_dump(plain))
    experiment = load_recipe(folder.config)
    _require_its_model(experiment, portable, source)
    folder.write_config(_header(portable, source) + to_yaml(experiment))
    payload = {
        "config": to_plain(experiment),
        "position": asdict(Position(step=portable.step or 0)),
        "model": portable.model.state_dict(),
        "average": None,
        "optimizer": None,
        "state": None,
        "window": None,
        "scores": {},
        "random": None,
        "converted_from": str(source),
    }
    checkpoints = CheckpointFolder(folder.checkpoints)
    checkpoints.save(portable.step or 0, payload)
    checkpoints.save_best(payload)


def _unknown_experiment(portable: PortableModel, target: Path) -> dict[str, Any]:
    """The part of an experiment that the model itself tells: its shape and its vocabulary."""
    entry = entry_of(portable.model)
    config: Any = portable.model.config
    words = "words" if type(portable.tokenizer).__name__ == "Vocabulary" else "bpe"
    data = {
        "path": UNKNOWN_CORPUS,
        "vocabulary": words,
        # A corpus is then read with the model's vocabulary instead of one of its own.
        "tokenizer": str(RunFolder(target).tokenizer.resolve()),
    }
    if hasattr(config, "segment_length"):
        data["segment_length"] = config.segment_length
    return {"experiment": experiment_name(find_task("text"), entry), "data": data, "model": config.without_sizes()}


def _require_its_model(experiment: Experiment, portable: PortableModel, source: Path) -> None:
    """Refuse an experiment that builds a different model: it was changed after training."""
    assert portable.tokenizer is not None
    sizes = experiment.task.sizes_of_vocabulary(experiment, len(portable.tokenizer))
    theirs = experiment.model.with_sizes(sizes)
    ours: Any = portable.model.config
    if hasattr(ours, "output_size"):
        ours = replace(ours, output_size=ours.output_size or ours.vocab_size)
    if type(theirs) is not type(ours):
        different = [f"one with a {type(theirs).__name__}, not a {type(ours).__name__}"]
    else:
        different = [
            f"{name} {value!r}, not {getattr(ours, name)!r}"
            for name, value in vars(theirs).items()
            if getattr(ours, name) != value
        ]
    if different:
        came = f"that of another model: {', '.join(different)}"
        raise ValueError(sentence(f"the experiment in {source}", came, "that of the model beside it"))


def _header(portable: PortableModel, source: Path) -> str:
    lines = [
        f"Made by `recurra convert` from {source}.",
        "Without the optimiser's state this run can be evaluated and generated from, not resumed. It has no log.",
    ]
    if portable.experiment is None:
        lines += [
            "How the model was trained is not known. The values of `model`, `data.vocabulary` and, if the model has",
            "segments, `data.segment_length` are the model's own; all others are defaults, not what it was trained",
            "with. To evaluate it, name a corpus with --data.path FOLDER; it is read with `data.tokenizer`.",
        ]
    return "".join(f"# {line}\n" for line in lines)
