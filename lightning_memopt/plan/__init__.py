"""Plans: lives of tensors, how they become a schedule, what a step by them costs, how they are checked, and how they are kept
in files.
"""

from lightning_memopt.plan.allocator import Reserved, reserved
from lightning_memopt.plan.files import plan_from_json, plan_to_json, read_plan, write_plan
from lightning_memopt.plan.lower import Fetch, Free, LoweringError, Rebuild, Schedule, Segment, lower
from lightning_memopt.plan.machine import FREE, Machine, Overhead
from lightning_memopt.plan.model import (
    Addresses,
    Life,
    Plan,
    Prediction,
    RegionPlan,
    StateParking,
    TiledHead,
    WeightParking,
    regions_text,
    saved_in_tiers,
    states_text,
    tiers_text,
    tiles_text,
    weights_text,
)
from lightning_memopt.plan.simulate import SegmentCost, Timeline, added_by, fixed_levels, segment_cost, simulate
from lightning_memopt.plan.updates import at_least, early, fewest, names_of, step_of, updated
from lightning_memopt.plan.validate import Report, validate, wrong_addresses

__all__ = [
    "Addresses",
    "FREE",
    "Fetch",
    "Free",
    "Life",
    "LoweringError",
    "Machine",
    "Overhead",
    "Plan",
    "Prediction",
    "RegionPlan",
    "Report",
    "Reserved",
    "Rebuild",
    "Schedule",
    "Segment",
    "SegmentCost",
    "TiledHead",
    "Timeline",
    "added_by",
    "at_least",
    "early",
    "fewest",
    "fixed_levels",
    "lower",
    "names_of",
    "plan_from_json",
    "plan_to_json",
    "read_plan",
    "regions_text",
    "reserved",
    "segment_cost",
    "saved_in_tiers",
    "simulate",
    "step_of",
    "states_text",
    "weights_text",
    "tiers_text",
    "tiles_text",
    "StateParking",
    "WeightParking",
    "updated",
    "validate",
    "wrong_addresses",
    "write_plan",
]
