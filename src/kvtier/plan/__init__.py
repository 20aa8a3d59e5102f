"""Decide what to load and what to recompute. Pure functions: no I/O, and time is an argument."""

from __future__ import annotations

from kvtier.plan.budget import WriteBudget
from kvtier.plan.cost import CostModel, Costs, Route, Ways, Witnesses, ways_of
from kvtier.plan.explain import Actual, Decision, Explanation, PromptCost, explain
from kvtier.plan.needs import GroupCapacity
from kvtier.plan.operations import Copy, Cut, Plan
from kvtier.plan.planner import plan_groups
from kvtier.plan.prefill import PrefillCost
from kvtier.plan.probe import num_to_probe
from kvtier.plan.steps import StepClock
from kvtier.plan.worth import Tell, weigh

__all__ = [
    "Actual",
    "Copy",
    "CostModel",
    "Costs",
    "Cut",
    "Decision",
    "Explanation",
    "GroupCapacity",
    "Plan",
    "PrefillCost",
    "PromptCost",
    "Route",
    "StepClock",
    "Tell",
    "Ways",
    "Witnesses",
    "WriteBudget",
    "explain",
    "num_to_probe",
    "plan_groups",
    "ways_of",
    "weigh",
]
