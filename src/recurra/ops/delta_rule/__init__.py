"""The gated delta rule, a linear recurrence that overwrites stored values, in several equivalent modes; and RWKV-7's."""

from recurra.ops.delta_rule.generalised import generalised_delta_rule
from recurra.ops.delta_rule.operator import Mode, delta_rule

__all__ = ["Mode", "delta_rule", "generalised_delta_rule"]
