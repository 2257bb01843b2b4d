"""The (gated) delta rule; docs/delta_rule.md has the mathematics."""

from fulmen.ops.delta_rule.api import delta_rule, delta_rule_step

__all__ = ["delta_rule", "delta_rule_step"]
