"""The weights that a language model starts from: a run's, a single file's, or a published model's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recurra.checks import sentence
from recurra.convert.portable import load_single_file
from recurra.convert.published.folder import ARCHITECTURES, from_huggingface, model_type_of, without_unused_tokens
from recurra.data.batches import DataSet
from recurra.data.corpus import ENCODERS
from recurra.data.tokenizers import TextEncoder
from recurra.train._distributed import Ranks, is_first_launched
from recurra.train.checkpoint import load_weights, scored_weights
from recurra.train.evaluate import evaluate
from recurra.train.experiment import Experiment, require_resumable, to_plain
from recurra.train.loop import Trainer
from recurra.train.recipe import load_recipe, split_variant, to_yaml
from recurra.train.run_folder import RunFolder, is_checkpoint, load_best_checkpoint

_READ = "the folder of a run, a checkpoint, a .safetensors file of ours, or a folder of a published model"


def start_language_model(model: nn.Module, path: str, encoder: TextEncoder | None = None) -> str:
    """Load trained weights into a fresh language model of the same shape and vocabulary; dropouts may differ.

    Args:
        model: changed in place.
        path: a run's folder (its best checkpoint), a checkpoint, a single file (.safetensors), or a published model.
        encoder: of the text that the model is trained on; None takes any.

    Returns:
        a line that says what was done.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(sentence("init_from", f"{place}, which does not exist", _READ))
    weights, theirs, what, tokenizer = _read(place)
    config: Any = model.config
    ours, sizes = _shape(config), config.sizes_from_data()
    differing = [
        f"{name} {value!r}, not {ours[name]!r}"
        for name, value in theirs.items()
        if name in ours
        and _undropped(value) != ours[name]
        and not (value is None and name in sizes)  # a run's recipe, whose data gave it
    ]
    if differing:
        raise ValueError(sentence(what, f"a model with {'; '.join(differing)}", "one of the recipe's shape"))
    if None not in (encoder, tokenizer) and encoder.fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        hint = "set data.tokenizer to its tokenizer.json"
        raise ValueError(sentence(what, "a model with another vocabulary of the same size", "that of the data", hint))
    load_weights(model, weights, place)
    return f"starts from {what}"


def _read(place: Path) -> tuple[Mapping[str, Tensor], dict[str, Any], str, TextEncoder | None]:
    """Weights by our names, the shape of their model, what messages call them, and the tokenizer if there is one."""
    if place.suffix == ".safetensors" and not is_checkpoint(place):
        portable = load_single_file(place)
    elif (place / "config.json").is_file() and model_type_of(place) in ARCHITECTURES:
        portable = without_unused_tokens(from_huggingface(place))
    elif is_checkpoint(place):
        file, saved = load_best_checkpoint(place)
        what = f"{file}, step {saved['position']['step']}"
        return scored_weights(saved), saved["config"]["model"], what, _tokenizer_of(file, saved["config"]["data"])
    else:
        raise ValueError(sentence("init_from", f"{place}, which is none of these", _READ))
    return portable.model.state_dict(), _shape(portable.model.config), str(place), portable.tokenizer


def _shape(config: Any) -> dict[str, Any]:
    """A model's settings as YAML has them, without dropouts; by default there are as many outputs as tokens."""
    shape = _undropped(asdict(config))
    if "output_size" in shape and shape["output_size"] is None:
        shape["output_size"] = shape["vocab_size"]
    return dict(shape)


def _tokenizer_of(checkpoint: Path, data: Mapping[str, Any]) -> TextEncoder | None:
    """The tokenizer of a checkpoint's run, if the file still lies in its folder."""
    file = RunFolder(checkpoint.parent.parent).tokenizer
    return ENCODERS[data["vocabulary"]].load(file) if file.is_file() and data.get("vocabulary") in ENCODERS else None


def _undropped(value: Any) -> Any:
    """A setting as YAML has it, without the dropouts in it."""
    if isinstance(value, Mapping):
        return {name: _undropped(item) for name, item in value.items() if "dropout" not in name}
    return [_undropped(item) for item in value] if isinstance(value, (list, tuple)) else value


# --- starting and resuming runs: a recipe or a run's folder in, a trainer out ---


def start_run(recipe: Path | str, folder: Path | str | None = None, overrides: Sequence[str] = ()) -> Trainer:
    """Prepare a new run of a recipe; `fit` trains it, and it is locked until that ends.

    Args:
        recipe: a YAML file, or FILE#VARIANT for a variant of a family.
        folder: where to write; None is `default_run_folder`.
        overrides: values set over the recipe, as words of a command line.
    """
    experiment = load_recipe(recipe, overrides)
    run = RunFolder(folder or default_run_folder(str(recipe)))
    run.require_new()
    trainer = Trainer(experiment, run, evaluate)
    trainer.begin()
    if trainer.ranks.is_first:
        with _kept_locked(run):
            run.require_new()  # another process may have begun in the meantime
            _describe(trainer)
    trainer.ranks.wait()
    return trainer


def resume_run(folder: Path | str, *, checkpoint: str = "last", overrides: Sequence[str] = ()) -> Trainer:
    """Prepare to continue a run from a checkpoint; `fit` trains it, and it is locked until that ends.

    Args:
        folder: the run's.
        checkpoint: "last", "previous", "best" or the path of a checkpoint file.
        overrides: values set over the run's config.yaml; only some may differ from what the run started with. The
            precision stays what it was, also on a machine where `auto` would choose another.
    """
    run = RunFolder(folder)
    run.require_run()
    with _kept_locked(run) if is_first_launched() else nullcontext():
        experiment = _with_own_precision(load_recipe(run.config, overrides), run)
        trainer = Trainer(experiment, run, evaluate, open_data=partial(_own_data, run))
        trainer.resume(checkpoint)
        if trainer.position.step == 0:  # no checkpoint that has compared the settings with its own
            require_resumable(to_plain(load_recipe(run.config)), trainer.experiment)
        if trainer.ranks.is_first:
            _describe(trainer)
    trainer.ranks.wait()
    return trainer


def _with_own_precision(experiment: Experiment, run: RunFolder) -> Experiment:
    """Let `auto` mean what the run began with: another machine must not change the rest of it."""
    training = experiment.training
    if training.precision == "auto":
        training = replace(training, precision=load_recipe(run.config).training.precision)
    return replace(experiment, training=training)


def default_run_folder(recipe: str) -> Path:
    """Name the folder of a recipe's run: runs/FOLDER-NAME for FOLDER/NAME.yaml, runs/FOLDER-VARIANT for a variant."""
    path, variant = split_variant(recipe)
    return Path("runs") / "-".join([path.resolve().parent.name, variant or path.stem])


@contextmanager
def _kept_locked(run: RunFolder) -> Iterator[None]:
    """Lock a run, and unlock it if the block fails; otherwise it stays locked until the end of `fit`."""
    run.lock()
    try:
        yield
    except BaseException:
        run.unlock()
        raise


def _own_data(run: RunFolder, experiment: Experiment, ranks: Ranks) -> DataSet:
    return experiment.task.open_data(experiment.data, run, rank=ranks.data_rank, world_size=ranks.data_count)


def _describe(trainer: Trainer) -> None:
    """Write what a run is into its folder: its configuration and its tokenizer or classes."""
    task = trainer.experiment.task
    task.check_extras(trainer.data)
    task.save_extras(trainer.data, trainer.folder)  # first: what has a configuration is a run
    trainer.folder.write_config(to_yaml(trainer.experiment))
