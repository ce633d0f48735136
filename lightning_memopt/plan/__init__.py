"""What to do about a step: lives, lowered to a schedule, priced by a simulator, checked by a validator."""

from lightning_memopt.plan.lower import Free, LoweringError, Run, Schedule, Segment, lower
from lightning_memopt.plan.model import Life, Plan, Prediction
from lightning_memopt.plan.simulate import Timeline, simulate

__all__ = ["Free", "Life", "LoweringError", "Plan", "Prediction", "Run", "Schedule", "Segment", "Timeline", "lower", "simulate"]
