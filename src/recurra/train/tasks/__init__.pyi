from recurra.train.tasks.generated import GeneratedConfig, GeneratedTask, Sequences
from recurra.train.tasks.induction import InductionConfig
from recurra.train.tasks.recall import RecallConfig
from recurra.train.tasks.state_tracking import StateTrackingConfig
from recurra.train.tasks.tokens import TokenTask

__all__ = [
    "GeneratedConfig",
    "GeneratedTask",
    "InductionConfig",
    "RecallConfig",
    "Sequences",
    "StateTrackingConfig",
    "TokenTask",
]
