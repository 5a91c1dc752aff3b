"""Where the run that a command names is: a folder, a name in runs/, or a model that comes with Recurra.

A model that comes with Recurra is one file, `pretrained_models/NAME.safetensors`, with its configuration and tokenizer
inside. When it is first used it is written as a run into the user's cache folder. All that reads runs then reads it,
and scores, sessions and figures have a folder that can be written to.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from recurra._files.digests import file_sha256
from recurra._files.reading import read_json, read_text
from recurra._files.writing import locked, put_in_place, replacing
from recurra.convert.portable import PortableModel, load_single_file, tokenizer_to_json
from recurra.data._files import user_cache_folder
from recurra.registry import did_you_mean
from recurra.train._resumable import Position
from recurra.train.checkpoint import CheckpointFolder
from recurra.train.experiment import to_plain
from recurra.train.recipe import load_recipe, to_yaml
from recurra.train.run_folder import RunFolder

_FOLDER = Path(__file__).parents[1] / "pretrained_models"
_RUNS = Path("runs")
_LISTED = "`recurra models` lists the models that come with Recurra"


def shipped_models() -> dict[str, dict[str, Any]]:
    """Read what `recurra models` shows of each model that comes with Recurra, by name."""
    return read_json(_FOLDER / "index.json")


def shipped_file(name: str) -> Path:
    """Locate the file of a model that comes with Recurra; its card is beside it, as NAME.md."""
    return _FOLDER / f"{name}.safetensors"


def find_run(place: str | Path) -> Path:
    """Find the folder of a run: at this path, in runs/ by its name, or by the name of a model that comes with Recurra.

    Folders win; a warning says so where a name could mean two things. Raises FileNotFoundError if there is none.
    """
    path, name, shipped = Path(place), str(place), shipped_models()
    if path.name != name:
        RunFolder(path).require_run()
        return path
    found = next((folder for folder in (path, _RUNS / name) if RunFolder(folder).config.is_file()), None)
    if found is None and name in shipped:
        return _unpacked(name)
    if found is None:
        trained = [folder.name for folder in _RUNS.iterdir() if folder.is_dir()] if _RUNS.is_dir() else []
        RunFolder(path).require_run(did_you_mean(name, [*shipped, *trained]) or _LISTED)
    elif name in shipped:
        warnings.warn(f"{name} is the run in {found.absolute()}, not the model that comes with Recurra", stacklevel=1)
    elif found != path:
        warnings.warn(f"{name} is the run in {found}", stacklevel=1)
    return found or path


def _unpacked(name: str) -> Path:
    """Return the run of a model that comes with Recurra; the first process that asks writes it."""
    file, folder = shipped_file(name), _place_of(name)
    if not _is_whole(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / ".lock"):
            if not _is_whole(folder):  # another process may have written it
                with put_in_place(folder) as scratch:
                    save_run(load_single_file(file), scratch, [f"{name}, which comes with Recurra."], source=file.name)
    return folder


def _is_whole(run: Path) -> bool:
    folder = RunFolder(run)
    return folder.config.is_file() and CheckpointFolder(folder.checkpoints).best.is_file()


def _place_of(name: str) -> Path:
    return user_cache_folder() / "models" / file_sha256(shipped_file(name))[:16] / name


def card_of(run: Path) -> str:
    """Read the card of a model that comes with Recurra, given the folder of its run; empty for other runs."""
    is_shipped = run.name in shipped_models() and run == _place_of(run.name)
    return read_text(shipped_file(run.name).with_suffix(".md")) if is_shipped else ""


def save_run(portable: PortableModel, path: Path, about: Sequence[str], *, source: str) -> None:
    """Write a model with its experiment as a run. about: lines at the top of its config.yaml."""
    folder = RunFolder(path)
    if portable.tokenizer is not None:
        with replacing(folder.tokenizer) as file:
            file.write(tokenizer_to_json(portable.tokenizer).encode())
    if portable.chat_template is not None:
        with replacing(folder.chat_template) as file:
            file.write(portable.chat_template.encode())
    folder.write_config(yaml.safe_dump(portable.experiment))
    experiment = load_recipe(folder.config)
    folder.write_config("".join(f"# {line}\n" for line in about) + to_yaml(experiment))
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
        "converted_from": source,
    }
    checkpoints = CheckpointFolder(folder.checkpoints)
    checkpoints.save(portable.step or 0, payload)
    checkpoints.call_best(portable.step or 0)
