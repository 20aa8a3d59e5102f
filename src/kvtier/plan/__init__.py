"""Decide what to copy and what to recompute. Pure: no I/O, and time is an argument."""

from __future__ import annotations

from kvtier.plan.budget import WriteBudget
from kvtier.plan.cost import CostModel, Costs, Route, Ways, ways_of
from kvtier.plan.operations import Copy, Plan
from kvtier.plan.planner import plan_load
from kvtier.plan.prefill import PrefillCost

__all__ = [
    "Copy",
    "CostModel",
    "Costs",
    "Plan",
    "PrefillCost",
    "Route",
    "Ways",
    "WriteBudget",
    "plan_load",
    "ways_of",
]
