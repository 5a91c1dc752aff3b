"""Starting and resuming runs: a recipe or a run's folder in, a trainer out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from recurra.data import DataSet
from recurra.evaluation import evaluate
from recurra.training import Experiment, RunFolder, Trainer, load_recipe, split_variant, to_yaml
from recurra.training.experiment import require_resumable, to_plain
from recurra.training.ranks import Ranks, is_first_launched


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
    trainer.folder.write_config(to_yaml(trainer.experiment))
    task.save_extras(trainer.data, trainer.folder)
