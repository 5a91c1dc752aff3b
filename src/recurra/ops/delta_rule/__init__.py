"""The gated delta rule and RWKV-7's generalisation: linear recurrences that overwrite what they remember."""

from recurra.ops.delta_rule.generalised import generalised_delta_rule
from recurra.ops.delta_rule.operator import Mode, delta_rule

__all__ = ["Mode", "delta_rule", "generalised_delta_rule"]
