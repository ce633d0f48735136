"""What was found for a card: the best plan, and what other options would bring."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.plan import Plan
from lightning_memopt.units import format_nbytes

RECOMPUTE, TILES, OFFLOAD, EARLY = "recompute", "loss head in tiles", "offload", "early updates"


@dataclass(frozen=True)
class Found:
    """The best plan that was found for a card.

    plan: the plan, or the smallest one if none fits.
    fits: whether it fits.
    seconds: what it takes on this card beyond the unmodified step.
    """

    plan: Plan
    fits: bool
    seconds: float

    @property
    def nbytes(self) -> int:
        """What the plan needs, as a budget counts it."""
        return self.plan.predicted.needed_nbytes if self.fits else self.plan.budget_nbytes

    @property
    def techniques(self) -> tuple[str, ...]:
        plan = self.plan
        moves = plan.parks or plan.states or plan.weights
        used = {RECOMPUTE: plan.predicted.rebuilt_ops, TILES: plan.tiles, OFFLOAD: moves, EARLY: plan.updates}
        return tuple(name for name, uses in used.items() if uses)

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes that a step copies to the tier, and back."""
        return self.plan.predicted.moved_nbytes // 2


@dataclass(frozen=True)
class Other:
    """What more techniques would bring on a card that no plan fits.

    offload, optimizer_in_backward: the options of a run that allow them.
    tile: this option, where it must be another one than was asked about; "" where it need not.
    missing_nbytes: bytes by which the smallest plan would be too large; 0 if one would fit.
    slowdown: predicted seconds of a step by the plan that fits, as a multiple of the unmodified one's; None if none does.
    """

    offload: str
    optimizer_in_backward: str
    tile: str
    missing_nbytes: int
    slowdown: float | None

    @property
    def text(self) -> str:
        given = {"tile": (self.tile, ""), "offload": (self.offload, "none")}
        given["optimizer_in_backward"] = self.optimizer_in_backward, "never"
        options = " and ".join(f"{name}={value!r}" for name, (value, default) in given.items() if value != default)
        if self.slowdown is None:
            return f"with {options}, {format_nbytes(self.missing_nbytes)} would be missing"
        return f"the step fits with {options}, x{self.slowdown:.2f}"
