"""From a recipe to a trained model."""

from recurra.training.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint, load_weights, scored_weights
from recurra.training.checkpointed import checkpointed
from recurra.training.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from recurra.training.experiment import (
    EXPERIMENTS,
    CompactRecurrentViTExperiment,
    Experiment,
    MemoryHorizonExperiment,
    PIViTExperiment,
    TextExperiment,
    TimeSformerExperiment,
    VideoExperiment,
)
from recurra.training.loop import Trainer, TrainingDiverged
from recurra.training.metrics import read_metrics
from recurra.training.models import CompactRecurrentViTRecipe, ModelRecipe, PIViTRecipe, TimeSformerRecipe
from recurra.training.optimizer import build_optimizer, parameter_groups
from recurra.training.optimizer_registry import list_optimizers, register_optimizer
from recurra.training.recipe import load_recipe, recipe_help, to_yaml
from recurra.training.recipe_family import RecipeFamily, read_family, split_variant
from recurra.training.recipe_files import RecipeError, find_recipe, recipe_names, recipes_folder
from recurra.training.run_folder import RunFolder
from recurra.training.schedule import learning_rate_factor
from recurra.training.starting_weights import start_from

__all__ = [
    "EXPERIMENTS",
    "AveragingConfig",
    "CheckpointError",
    "CheckpointFolder",
    "CompactRecurrentViTExperiment",
    "CompactRecurrentViTRecipe",
    "Experiment",
    "MemoryHorizonExperiment",
    "ModelRecipe",
    "OptimizerConfig",
    "PIViTExperiment",
    "PIViTRecipe",
    "RecipeError",
    "RecipeFamily",
    "RunFolder",
    "ScheduleConfig",
    "TextExperiment",
    "TimeSformerExperiment",
    "TimeSformerRecipe",
    "Trainer",
    "TrainingConfig",
    "TrainingDiverged",
    "VideoExperiment",
    "build_optimizer",
    "checkpointed",
    "find_recipe",
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
    "scored_weights",
    "split_variant",
    "start_from",
    "to_yaml",
]
