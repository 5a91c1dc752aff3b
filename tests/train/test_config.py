import math
import typing
from dataclasses import fields
from functools import partial

import pytest
from tests.impossible import wrong_numbers

from recurra.train.adapters import LoraConfig
from recurra.train.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig

IMPOSSIBLE = [
    (OptimizerConfig, "optimizer", "learning_rate", 0.0),
    (OptimizerConfig, "optimizer", "betas", (0.9, 1.0)),
    (OptimizerConfig, "optimizer", "betas", 0.9),
    (OptimizerConfig, "optimizer", "epsilon", 0.0),
    (partial(OptimizerConfig, algorithm="sgd"), "optimizer", "momentum", 1.5),
    (partial(OptimizerConfig, algorithm="sgd", momentum=0.0), "optimizer", "nesterov", True),
    (OptimizerConfig, "optimizer", "transition_learning_rate", 0.0),
    (OptimizerConfig, "optimizer", "gradient_clip", 0.0),
    (ScheduleConfig, "schedule", "final_fraction", 1.1),
    (partial(ScheduleConfig, shape="wsd"), "schedule", "decay_fraction", 0.0),
    (partial(ScheduleConfig, shape="wsd"), "schedule", "decay_fraction", 1.5),
    (partial(ScheduleConfig, shape="steps"), "schedule", "steps", []),
    (partial(ScheduleConfig, shape="steps"), "schedule", "steps", [3, 3]),
    (partial(ScheduleConfig, shape="steps", steps=[1]), "schedule", "factor", 1.0),
    (TrainingConfig, "training", "keep_checkpoints", 1),
    (TrainingConfig, "training", "strategy", "all"),
    (partial(AveragingConfig, start_step=1), "averaging", "decay", 1.0),
    (AveragingConfig, "averaging", "decay", 0.9),  # without a start
    (TrainingConfig, "training", "seed", 2**32),
]
CONFIGS = {
    "averaging": AveragingConfig,
    "lora": LoraConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
}
POSSIBLE = {("start_step", 0), ("warmup_steps", 0), ("seed", 0), ("stop_at", math.inf)}


@pytest.mark.parametrize(("config", "section", "field", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused_by_their_full_name(config, section, field, value, unchecked):
    with pytest.raises(ValueError, match=rf"^{section}\.{field} is .*; expected "):
        config(**{field: value})


@pytest.mark.parametrize("section", CONFIGS)
def test_no_field_takes_a_number_that_cannot_be(section, unchecked):
    hints = typing.get_type_hints(CONFIGS[section])
    for field in fields(CONFIGS[section]):
        for wrong in wrong_numbers(hints[field.name]):
            if (field.name, wrong) not in POSSIBLE:
                with pytest.raises(ValueError, match=rf"^{section}\.{field.name} is .*; expected "):
                    CONFIGS[section](**{field.name: wrong})


def test_impossible_rates_of_patterns_are_refused_by_their_pattern():
    with pytest.raises(ValueError, match=r"^optimizer.parameter_learning_rates\['\*.bias'\] is 0.0; expected a finite"):
        OptimizerConfig(parameter_learning_rates={"head.*": 0.1, "*.bias": 0.0})


@pytest.mark.parametrize(("field", "value"), [("checkpoint_blocks", True), ("compile", True)])
def test_what_pieces_of_sequences_do_not_allow_is_refused(field, value):
    with pytest.raises(
        ValueError, match=rf"^training\.{field} is {value}; expected .* with training.sequence_parallel"
    ):
        TrainingConfig(sequence_parallel=2, **{field: value})
