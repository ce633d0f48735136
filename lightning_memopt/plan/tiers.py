"""The bytes that a plan takes in each tier. A run reserves them when the plan is put in force, and a step uses them bit by bit:
no space is used twice in a step.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from lightning_memopt.plan.forms import tier_of
from lightning_memopt.units import format_nbytes, round_up

ALIGN_NBYTES = 4096
"""Tiers give each tensor a multiple of this."""
PAGE_NBYTES = mmap.ALLOCATIONGRANULARITY
"""Frozen weights begin on a page of the tier."""
Limits = Mapping[str, int]
"""Tier -> the most bytes that a plan may take there. A tier that is not named has no limit."""


def taken(form: str, nbytes: int) -> int:
    """The bytes that a tensor takes in the tier of its form, if it takes `nbytes` in this form; 0 if it stays on the device."""
    return round_up(nbytes, ALIGN_NBYTES) if tier_of(form) else 0


def tier_budget(budget: tuple[str, int]) -> str:
    """The budget of a tier that a user has to set, as every message names it."""
    tier, nbytes = budget
    return f"{tier}_budget={nbytes} or more ({format_nbytes(nbytes)})"


def tier_budgets_text(budgets: Mapping[str, int]) -> str:
    """What else a user may set, as text for messages; "" for no budgets."""
    return "".join(f", or {tier_budget(budget)}" for budget in budgets.items())


def within(nbytes: Mapping[str, int], limits: Limits) -> bool:
    """Whether these bytes of each tier keep the limits."""
    return all(nbytes.get(tier, 0) <= most for tier, most in limits.items())
