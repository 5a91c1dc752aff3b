"""From a recipe to a trained model."""

from recurra.training.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint, load_weights, scored_weights
from recurra.training.checkpointed import checkpointed
from recurra.training.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from recurra.training.experiment import Experiment
from recurra.training.loop import Trainer, TrainingDiverged
from recurra.training.metrics import read_metrics
from recurra.training.optimizer import build_optimizer, parameter_groups
from recurra.training.optimizer_registry import list_optimizers, register_optimizer
from recurra.training.recipe import load_recipe, recipe_help, to_yaml
from recurra.training.recipe_family import RecipeFamily, read_family, split_variant
from recurra.training.recipe_files import RecipeError, find_recipe, recipe_names, recipes_folder
from recurra.training.run_folder import RunFolder
from recurra.training.schedule import learning_rate_factor
from recurra.training.sequence_parallel import SequenceParallel
from recurra.training.task import Task, experiment_names, find_task, register_task

__all__ = [
    "AveragingConfig",
    "CheckpointError",
    "CheckpointFolder",
    "Experiment",
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
