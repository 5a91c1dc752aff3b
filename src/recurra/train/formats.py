"""The formats of a trained language model on disk: how each is recognised, read and written.

run           a folder that `recurra train` writes: config.yaml, tokenizer.json, checkpoints/
hf            a folder that transformers loads: config.json, model.safetensors, tokenizer.json
safetensors   one file, with its configuration and tokenizer in the metadata
published     a folder that transformers loads with a class of its own, such as MambaForCausalLM
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

from recurra.checks import choose, sentence
from recurra.convert.portable import PortableModel, load_single_file, require_equal, save_single_file, tokenizer_to_json
from recurra.convert.published.folder import (
    ARCHITECTURES,
    from_huggingface,
    model_type_of,
    to_huggingface,
    without_unused_tokens,
)
from recurra.files.digests import STAMP
from recurra.files.writing import replacing
from recurra.models.registry import entry_of
from recurra.streams.continuation import start_of
from recurra.train.checkpoint import CheckpointFolder
from recurra.train.experiment import Experiment, to_plain
from recurra.train.recipe import load_recipe, to_yaml
from recurra.train.resumable import Position
from recurra.train.run import open_run
from recurra.train.run_folder import RunFolder
from recurra.train.task import experiment_name, find_task

FORMATS = ("run", "hf", "safetensors", "published")


def _format_of(path: Path) -> str:
    """Recognise the format of the model at `path`."""
    if not path.exists():
        raise FileNotFoundError(sentence("model", f"{path}, which does not exist", "a file or folder"))
    if path.is_file() and path.suffix == ".safetensors":
        return "safetensors"
    if RunFolder(path).config.is_file():
        return "run"
    if (path / "config.json").is_file():
        return "published" if model_type_of(path) in ARCHITECTURES else "hf"
    expected = "a run (a folder with config.yaml), a folder for transformers (with config.json) or a .safetensors file"
    raise ValueError(sentence("model", str(path), expected))


def convert_model(
    source: Path,
    target: Path,
    to: str,
    *,
    checkpoint: str = "best",
    overrides: Sequence[str] = (),
    force: bool = False,
) -> float:
    """Write the model at `source` in another format, and compare the logits of both before it is put in place.

    Args:
        source: a model in any format.
        target: the folder or file to write.
        to: one of `FORMATS`.
        checkpoint, overrides: for a source that is a run, as in `open_run`.
        force: write into a folder that is not empty, or over a file. A run is never overwritten.

    Returns:
        the largest difference between the logits.
    """
    if to == _format_of(source):
        raise ValueError(sentence("source", f"{source}, which has the format {to} already", "a model in another one"))
    if target.resolve() == source.resolve():
        raise ValueError(sentence("target", f"{target}, which is the source", "another name"))
    return _write_model(
        _read_model(source, checkpoint=checkpoint, overrides=overrides), to, target, source=source, force=force
    )


def _read_model(path: Path, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> PortableModel:
    """Read a model in any format; `checkpoint` and `overrides` are for runs, as in `open_run`."""
    found = _format_of(path)
    if found != "run":
        if overrides or checkpoint != "best":
            hint = "--checkpoint and values of a recipe are for runs"
            raise ValueError(sentence("model", f"{path}, a model in the format {found}", "a run", hint))
        readers = {"safetensors": load_single_file, "published": _read_published}
        return readers.get(found, lambda path: _huggingface().load_folder(path))(path)
    run = open_run(path, checkpoint=checkpoint, overrides=overrides)
    tokenizer = run.tokenizer  # first: only text runs have one
    return PortableModel(run.model, tokenizer, to_plain(run.experiment), run.step)


def _write_model(portable: PortableModel, to: str, target: Path, *, source: Path, force: bool = False) -> float:
    """Write a model in a format, and compare what was written with it before it is put in place.

    Args:
        portable: the model.
        to: one of `FORMATS`.
        target: the folder or file.
        source: where the model is from; the config.yaml of a run names it.
        force: write into a folder that is not empty, or over a file. A run is never overwritten.

    Returns:
        the largest difference between the logits.
    """
    writers = {"run": _write_run, "hf": _write_hf, "safetensors": _write_single_file, "published": _write_published}
    write = choose("to", writers, to)
    occupied = _require_free(to, target, force)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        written = write(portable, scratch, target, source)
        difference = _require_same(portable, written, target)
        if portable.tokenizer is None and target.is_dir() and (target / "tokenizer.json").exists():
            got = "that of another model, and the new one has none"
            raise ValueError(sentence(f"the tokenizer in {target}", got, "a folder without one", "nothing was written"))
        _put(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True) if scratch.is_dir() else scratch.unlink(missing_ok=True)
    # Files that were there before may be read together with the new ones.
    if occupied and target.is_dir():
        difference = _require_same(portable, _read_model(target), target, "files that were there before remain")
    return difference


def _write_single_file(portable: PortableModel, scratch: Path, target: Path, source: Path) -> PortableModel:
    save_single_file(portable, scratch)
    return load_single_file(scratch)


def _write_hf(portable: PortableModel, scratch: Path, target: Path, source: Path) -> PortableModel:
    _huggingface().save_folder(portable, scratch)
    return _huggingface().load_folder(scratch)


def _read_published(path: Path) -> PortableModel:
    return without_unused_tokens(from_huggingface(path))


def _write_published(portable: PortableModel, scratch: Path, target: Path, source: Path) -> PortableModel:
    to_huggingface(portable, scratch)
    return _read_published(scratch)


def _write_run(portable: PortableModel, scratch: Path, target: Path, source: Path) -> PortableModel:
    _save_run(portable, scratch, target=target, source=source)
    return _read_model(scratch)


def _require_same(
    portable: PortableModel, written: PortableModel, target: Path, hint: str = "nothing was written"
) -> float:
    if _plain_tokenizer(portable) != _plain_tokenizer(written):
        raise ValueError(sentence(f"the tokenizer in {target}", "another one", "the model's", hint))
    return require_equal(portable.model, written.model, f"{target}")


def _plain_tokenizer(portable: PortableModel) -> dict[str, Any] | None:
    """The tokenizer as plain data. Of what adds tokens to a text, which transformers may word otherwise, the tokens."""
    if portable.tokenizer is None:
        return None
    content: dict[str, Any] = json.loads(tokenizer_to_json(portable.tokenizer))
    if "model" in content:  # the digest of byte pairs depends on the rest
        del content["model"][STAMP]
    return {**content, "post_processor": start_of(portable.tokenizer)}


def _require_free(to: str, target: Path, force: bool) -> bool:
    """Tell whether there is something that may be overwritten; refuse what may not."""
    if RunFolder(target).config.exists():
        raise FileExistsError(
            sentence("target", f"{target}, which contains a run", "another name", "a run is never overwritten")
        )
    if target.exists() and target.is_dir() == (to == "safetensors"):
        found, wanted = ("folder", "file") if target.is_dir() else ("file", "folder")
        raise FileExistsError(sentence("target", f"{target}, which is a {found}", f"the name of a {wanted}"))
    occupied = target.is_file() or (target.is_dir() and any(target.iterdir()))
    if occupied and not force:
        what = "exists" if target.is_file() else "is not empty"
        raise FileExistsError(sentence("target", f"{target}, which {what}", "another name", "--force overwrites it"))
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
        import recurra.convert.huggingface
    except ImportError as error:
        raise ValueError(f"the package transformers is missing: pip install 'recurra[hf]' ({error})") from error
    return recurra.convert.huggingface


# --- runs ---

_UNKNOWN_CORPUS = "unknown"
"""data.path of a run whose corpus is not known."""


def _save_run(portable: PortableModel, path: Path, *, target: Path, source: Path) -> None:
    """Write a model as a run.

    Args:
        portable: the model, with its tokenizer.
        path: the folder to write.
        target: where that folder will be.
        source: where the model is from; config.yaml names it.
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
        "path": _UNKNOWN_CORPUS,
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
        got = f"that of another model: {', '.join(different)}"
        raise ValueError(sentence(f"the experiment in {source}", got, "that of the model beside it"))


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
