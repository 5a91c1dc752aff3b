"""The gated delta rule, a linear recurrence that overwrites what it remembers, in modes with one result."""

from recurra.ops.delta_rule.operator import MODES, delta_rule

__all__ = ["MODES", "delta_rule"]
