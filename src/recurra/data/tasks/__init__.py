"""Tasks that are drawn: what gates, memory and attention are each good for, measured without a corpus."""

from recurra.data.tasks.task_data import (
    STATE_TRACKING,
    InductionConfig,
    RecallConfig,
    StateTrackingConfig,
    TaskConfig,
    TaskData,
)

__all__ = ["STATE_TRACKING", "InductionConfig", "RecallConfig", "StateTrackingConfig", "TaskConfig", "TaskData"]
