"""Starting and resuming runs: a recipe or a run's folder in, a trainer out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from recurra.checks import sentence
from recurra.data import TextData
from recurra.data.video import VideoData
from recurra.evaluation import evaluate
from recurra.files.writing import replacing
from recurra.runs.own_data import can_be_listed, own_data
from recurra.training import Experiment, RunFolder, Trainer, load_recipe, split_variant, to_yaml
from recurra.training.experiment import require_resumable, to_plain
from recurra.training.ranks import is_first_launched


def start_run(recipe: Path | str, folder: Path | str | None = None, overrides: Sequence[str] = ()) -> Trainer:
    """Prepare a new run of a recipe; `fit` trains it, and it is locked until that ends.

    Args:
        recipe: a YAML file, or FILE#VARIANT for a variant of a family.
        folder: where to write; None is `default_run_folder`.
        overrides: values set over the recipe, as words of a command line.

    Raises:
        FileExistsError: the folder already contains a run.
        BlockingIOError: another process trains a run in it.
        ValueError: the recipe is impossible. Like missing data, it leaves no run behind.
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

    Raises:
        FileNotFoundError: the folder does not contain a run.
        BlockingIOError: another process trains the run.
        CheckpointError: the checkpoint cannot be used.
        ValueError: an override changes what may not change or ends the run before its checkpoint, or the data have
            other classes than the run.
    """
    run = RunFolder(folder)
    run.require_run()
    with _kept_locked(run) if is_first_launched() else nullcontext():
        experiment = _with_own_precision(load_recipe(run.config, overrides), run)
        trainer = Trainer(experiment, run, evaluate, open_data=lambda given, ranks: own_data(given, run, ranks))
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


def _describe(trainer: Trainer) -> None:
    """Write what a run is into its folder: its configuration and its tokenizer or classes."""
    folder = trainer.folder
    if isinstance(trainer.data, VideoData):
        _require_class_names(trainer.data.class_names)
    folder.write_config(to_yaml(trainer.experiment))
    if isinstance(trainer.data, TextData) and not folder.tokenizer.exists():
        trainer.data.save_tokenizer(folder.tokenizer)
    if isinstance(trainer.data, VideoData):
        with replacing(folder.classes) as file:
            file.write("".join(f"{name}\n" for name in trainer.data.class_names).encode())


def _require_class_names(names: Sequence[str]) -> None:
    bad = next((name for name in names if not can_be_listed(name)), None)
    if bad is not None:
        raise ValueError(sentence("the name of a class", repr(bad), "letters, and no control characters"))
