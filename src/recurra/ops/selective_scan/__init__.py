"""The selective scan of Mamba: a diagonal recurrence of several modes a channel, with steps that the data choose."""

from recurra.ops.selective_scan.operator import selective_scan

__all__ = ["selective_scan"]
