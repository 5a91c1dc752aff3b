"""The gated delta rule, a linear recurrence that overwrites stored values, in several equivalent modes."""

from recurra.ops.delta_rule.operator import Mode, delta_rule

__all__ = ["Mode", "delta_rule"]
