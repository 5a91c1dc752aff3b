from recurra.train.task import TokenTask
from recurra.train.tasks.generated import GeneratedConfig, GeneratedTask, Sequences
from recurra.train.tasks.problems import InductionConfig, RecallConfig, StateTrackingConfig

__all__ = [
    "GeneratedConfig",
    "GeneratedTask",
    "InductionConfig",
    "RecallConfig",
    "Sequences",
    "StateTrackingConfig",
    "TokenTask",
]
