from recurra.train.task import TokenTask
from recurra.train.tasks.generated import GeneratedConfig, GeneratedTask, Sequences
from recurra.train.tasks.recall import InductionConfig, RecallConfig
from recurra.train.tasks.state_tracking import StateTrackingConfig

__all__ = [
    "GeneratedConfig",
    "GeneratedTask",
    "InductionConfig",
    "RecallConfig",
    "Sequences",
    "StateTrackingConfig",
    "TokenTask",
]
