"""What plans may use, by the options of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError
from lightning_memopt.units import parse_budget

SEARCH_SECONDS = 10.0
"""Time limit of the search for faster plans with what the user allows."""
GivenBudget = str | float | int | None


def config_of(
    offload: str = "none",
    optimizer_in_backward: str = "never",
    tile: str = "exact",
    *,
    budgets: Mapping[str, GivenBudget] = MappingProxyType({}),
    solver_seconds: float = SEARCH_SECONDS,
) -> MemOptConfig:
    """What a plan may use. `budgets`: those of tiers. Raises ConfigError for values that no run takes, and for a share of a
    machine, which need not be this one.
    """
    return MemOptConfig(
        offload=offload,
        host_budget=_in_bytes("host", budgets),
        disk_budget=_in_bytes("disk", budgets),
        optimizer_in_backward=optimizer_in_backward,  # type: ignore[arg-type]
        tile=tile,
        solver_seconds=solver_seconds,
    )


def _in_bytes(tier: str, budgets: Mapping[str, GivenBudget]) -> int | None:
    given, name = budgets.get(tier), f"{tier}_budget"
    if given is None:
        return None
    nbytes, doubled = (parse_budget(given, most, name=name, of=f"the {tier}") for most in (1 << 62, 1 << 63))
    if nbytes != doubled:
        raise ConfigError(f"{name} is {given!r}, a share of a machine that need not be this one. Give bytes, like '64GiB'.")
    return nbytes
