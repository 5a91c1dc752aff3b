"""The kinds of data, a file each: what they are, how runs over them are scored, and what their figures show.

A module registers its tasks (`recurra.training.task`); all are imported when an experiment is looked up.
"""

from typing import TYPE_CHECKING, Any

from recurra.registry import find_public

if TYPE_CHECKING:
    from recurra.tasks.generated import GeneratedConfig, GeneratedTask, Sequences
    from recurra.tasks.induction import InductionConfig
    from recurra.tasks.recall import RecallConfig
    from recurra.tasks.state_tracking import StateTrackingConfig
    from recurra.tasks.tokens import TokenTask

__all__ = [
    "GeneratedConfig",
    "GeneratedTask",
    "InductionConfig",
    "RecallConfig",
    "Sequences",
    "StateTrackingConfig",
    "TokenTask",
]


def __getattr__(name: str) -> Any:
    globals()[name] = find_public(__name__, name)
    return globals()[name]
