"""The gated delta rule, a linear recurrence that overwrites what it remembers, in modes with one result."""

from recurra.ops.delta_rule.operator import Mode, delta_rule

__all__ = ["Mode", "delta_rule"]
