from recurra.train.adapters import LoraConfig
from recurra.train.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint, load_weights, scored_weights
from recurra.train.config import (
    AveragingConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
    list_optimizers,
    register_optimizer,
)
from recurra.train.experiment import Experiment
from recurra.train.loop import Trainer, TrainingDiverged
from recurra.train.losses import checkpointed
from recurra.train.metrics import read_metrics
from recurra.train.optimizer import build_optimizer, learning_rate_factor, parameter_groups
from recurra.train.recipe import (
    RecipeError,
    RecipeFamily,
    find_recipe,
    load_recipe,
    read_family,
    recipe_help,
    recipe_names,
    recipes_folder,
    split_variant,
    to_yaml,
)
from recurra.train.run_folder import RunFolder
from recurra.train.sequence_parallel import SequenceParallel
from recurra.train.task import Task, experiment_names, find_task, register_task

__all__ = [
    "AveragingConfig",
    "CheckpointError",
    "CheckpointFolder",
    "Experiment",
    "LoraConfig",
    "OptimizerConfig",
    "RecipeError",
    "RecipeFamily",
    "RunFolder",
    "ScheduleConfig",
    "SequenceParallel",
    "Task",
    "Trainer",
    "TrainingConfig",
    "TrainingDiverged",
    "build_optimizer",
    "checkpointed",
    "experiment_names",
    "find_recipe",
    "find_task",
    "learning_rate_factor",
    "list_optimizers",
    "load_checkpoint",
    "load_recipe",
    "load_weights",
    "parameter_groups",
    "read_family",
    "read_metrics",
    "recipe_help",
    "recipe_names",
    "recipes_folder",
    "register_optimizer",
    "register_task",
    "scored_weights",
    "split_variant",
    "to_yaml",
]
