"""The forms in which a trained language model lies on disk, and how each is read and written.

run           a folder that `recurra train` writes: config.yaml, tokenizer.json, checkpoints/
hf            a folder that transformers loads: config.json, model.safetensors, tokenizer.json
safetensors   one file, its configuration and tokenizer in the metadata
"""

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from recurra.convert import PortableModel, load_single_file, require_equal, save_single_file, tokenizer_to_json
from recurra.data.files import replacing
from recurra.models import DataSizes, entry_of
from recurra.runs import open_run
from recurra.training import (
    CheckpointFolder,
    Experiment,
    RunFolder,
    TextExperiment,
    load_recipe,
    to_yaml,
)
from recurra.training.experiment import experiment_name, to_plain
from recurra.training.loop import Position

FORMS = ("run", "hf", "safetensors")
"""The forms by name."""
UNKNOWN_CORPUS = "unknown"
"""data.path of a run whose corpus is not known."""


def form_of(path: Path) -> str:
    """Tell in which form a model lies at `path`.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is none of the forms.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if path.is_file() and path.suffix == ".safetensors":
        return "safetensors"
    if RunFolder(path).config.is_file():
        return "run"
    if (path / "config.json").is_file():
        return "hf"
    raise ValueError(
        f"{path} is neither a run (a folder with config.yaml), nor a folder for transformers (with config.json), nor a "
        ".safetensors file"
    )


def read_model(path: Path, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> PortableModel:
    """Read a model in any form; `checkpoint` and `overrides` are of runs, and as `open_run` takes them.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or not a language model; or a package is missing.
    """
    form = form_of(path)
    if form != "run":
        if overrides or checkpoint != "best":
            raise ValueError(f"{path} is no run: --checkpoint and values of a recipe are for runs")
        return load_single_file(path) if form == "safetensors" else _huggingface().load_folder(path)
    trained = open_run(path, checkpoint=checkpoint, overrides=overrides)
    tokenizer = trained.tokenizer  # first: only runs over text have one
    return PortableModel(trained.model, tokenizer, to_plain(trained.experiment), trained.step)


def write_model(portable: PortableModel, form: str, target: Path, *, source: Path, force: bool = False) -> float:
    """Write a model in a form, and compare what was written with it, before it is put in its place.

    Args:
        portable: the model.
        form: one of `FORMS`.
        target: the file or folder.
        source: where the model is from; a run's config.yaml names it.
        force: write into a folder that is not empty, or over a file. A run is never overwritten.

    Returns:
        the largest difference of the logits.

    Raises:
        FileExistsError: something is there.
        ValueError: the logits differ by more than 1e-5, or the form cannot hold the model.
    """
    occupied = _require_free(form, target, force)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        if form == "safetensors":
            save_single_file(portable, scratch)
            written = load_single_file(scratch)
        elif form == "hf":
            _huggingface().save_folder(portable, scratch)
            written = _huggingface().load_folder(scratch)
        else:
            _save_run(portable, scratch, target=target, source=source)
            written = read_model(scratch)
        difference = _require_same(portable, written, target)
        _put(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True) if scratch.is_dir() else scratch.unlink(missing_ok=True)
    # files that were there before may be read with the new ones
    return _require_same(portable, read_model(target), target) if occupied and target.is_dir() else difference


def _require_same(portable: PortableModel, written: PortableModel, target: Path) -> float:
    if _plain_tokenizer(portable) != _plain_tokenizer(written):
        raise ValueError(f"{target}: its tokenizer is another one than the model's")
    return require_equal(portable.model, written.model, f"{target}")


def _plain_tokenizer(portable: PortableModel) -> dict[str, Any] | None:
    """The tokenizer as plain data, but for what adds tokens to a text, which runs leave out."""
    if portable.tokenizer is None:
        return None
    content: dict[str, Any] = json.loads(tokenizer_to_json(portable.tokenizer))
    return {**content, "post_processor": None}


def _require_free(form: str, target: Path, force: bool) -> bool:
    """Tell whether something is there that may be overwritten."""
    if RunFolder(target).config.exists():
        raise FileExistsError(f"{target} holds a run, which is not overwritten; choose another name")
    if target.exists() and target.is_dir() == (form == "safetensors"):
        raise FileExistsError(f"{target} is a {'folder' if target.is_dir() else 'file'}; choose another name")
    occupied = target.is_file() or (target.is_dir() and any(target.iterdir()))
    if occupied and not force:
        what = "exists" if target.is_file() else "is not empty"
        raise FileExistsError(f"{target} {what}; choose another name, or overwrite what is there with --force")
    return occupied


def _put(scratch: Path, target: Path) -> None:
    if scratch.is_file() or not target.exists():
        scratch.replace(target)
        return
    for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
        place = target / file.relative_to(scratch)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)


def _huggingface() -> ModuleType:
    try:
        import recurra.huggingface
    except ImportError as error:
        raise ValueError(f"this needs the package transformers: pip install 'recurra[hf]' ({error})") from error
    return recurra.huggingface


def _save_run(portable: PortableModel, path: Path, *, target: Path, source: Path) -> None:
    """Write a run that can be evaluated and generated from, but has nothing to go on training with."""
    if portable.tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, and a run cannot be without")
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
    """What is known of an experiment from the model: its shape and its vocabulary."""
    entry = entry_of(portable.model)
    config: Any = portable.model.config
    words = "words" if type(portable.tokenizer).__name__ == "Vocabulary" else "bpe"
    data = {
        "path": UNKNOWN_CORPUS,
        "vocabulary": words,
        # so that a corpus that is given is read with the model's vocabulary, not with one of its own
        "tokenizer": str(RunFolder(target).tokenizer.resolve()),
    }
    if hasattr(config, "segment_length"):
        data["segment_length"] = config.segment_length
    return {"experiment": experiment_name(entry), "data": data, "model": entry.shape_of(config)}


def _require_its_model(experiment: Experiment, portable: PortableModel, source: Path) -> None:
    """Refuse an experiment that makes another model than the one there is: one that was changed after its training."""
    assert isinstance(experiment, TextExperiment)
    assert portable.tokenizer is not None
    n_tokens = len(portable.tokenizer)
    theirs = experiment.model.build(DataSizes(n_tokens, n_tokens, experiment.data.segment_length)).config
    ours: Any = portable.model.config
    if hasattr(ours, "output_size"):
        ours = replace(ours, output_size=ours.output_size or ours.vocab_size)
    if type(theirs) is not type(ours):
        kinds = type(theirs).__name__, type(ours).__name__
        raise ValueError(f"{source} keeps the experiment of another model: one with a {kinds[0]}, here a {kinds[1]}")
    different = [
        f"{name} {value!r}, here {getattr(ours, name)!r}"
        for name, value in vars(theirs).items()
        if getattr(ours, name) != value
    ]
    if different:
        raise ValueError(f"{source} keeps the experiment of another model: {', '.join(different)}")


def _header(portable: PortableModel, source: Path) -> str:
    lines = [
        f"Made by `recurra convert` from {source}.",
        "There is neither the optimiser's state nor a log: the run can be evaluated and generated from, not resumed.",
    ]
    if portable.experiment is None:
        lines += [
            "How the model was trained is not known. Of what follows, `model`, `data.vocabulary` and, where the model",
            "has segments, `data.segment_length` are the model's; all else are defaults, not what it was trained with.",
            "Say which corpus to evaluate on with --data.path FOLDER; it is read with `data.tokenizer`.",
        ]
    return "".join(f"# {line}\n" for line in lines)
