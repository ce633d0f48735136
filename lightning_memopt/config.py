"""All options, defined once for the strategy, `optimize` and the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

from lightning_memopt.errors import BudgetError, ConfigError
from lightning_memopt.plan.forms import LOSSY
from lightning_memopt.plan.model import Objective
from lightning_memopt.units import parse_budget

if TYPE_CHECKING:  # a launcher checks options in a process whose script must be the first to import torch
    import torch


Decorated = TypeVar("Decorated")
OnExceed = Literal["replan", "warn", "raise"]
EarlyUpdating = Literal["never", "auto", "always"]
OFFLOAD = ("none", "auto", "host", "disk")
COMPRESS = ("none", "lossless", "lossy")
TILE = ("off", "exact", "rounding")


ONLY_OBSERVED = 1 << 20
"""A value of `profile_steps` that is large enough that every step is observed and no plan is solved."""


@dataclass(frozen=True, kw_only=True)
class MemOptConfig:
    """The options: what a step may use, and by which techniques it is kept within that.

    Args:
        budget: bytes of the training device that a whole step may use: `"8GiB"`, `"8GB"`, `"80%"` or a float in (0, 1] of
            the device, an int of bytes, `"auto"` (90 % of the device) or `"min"` (the smallest plan within `max_slowdown`).
        max_slowdown: for `budget="min"`: maximum predicted time of a planned step, including the package's own work, as a
            multiple of the unmodified step's. 1.0: only plans that take no longer; `math.inf`: the smallest plan, however slow.
            The smallest plans of our fifteen benchmark models take 1.4 to 2.6 times as long, so the default of 3.0 allows them.
            Above it, steps of many tiny ops become several times slower for little memory.
        recompute: whether saved tensors may be dropped and rebuilt. False: no op runs twice. Then only `offload`, `compress`
            and `optimizer_in_backward` reduce memory, and observed steps use as much memory as without a plan.
        offload: where saved tensors may be parked until backward, gradients from then until the update, optimizer state between
            updates, and weights while other modules run: `"none"`; `"disk"` (an unnamed temporary file, for any device,
            in the system's temporary directory or the given one: `"disk:/fast/nvme"`); `"host"` (page-locked memory, for CUDA
            devices); `"auto"` (`"host"` for CUDA devices, else `"none"`).
        host_budget: the most bytes of the host's memory that this process may take for what it parks there: saved tensors,
            gradients, optimizer state and weights together. Written as `budget`; shares are of the host's memory. Plans
            that would take more are not made. None: nine tenths of what the machine, or its container, has left when a plan is
            made.
        disk_budget: the same for files, with `offload="disk"`. Shares are of the disk.
        compress: `"none"`; `"lossless"`: boolean and ReLU masks are stored as one bit per value, and gradients are unchanged;
            `"lossy"` also stores the inputs of convolutions and linear layers at 8 bits per value, which changes gradients; a
            codec's name (`"block4"`, `"block6"`, ... `"block16"`, `"int8"`, `"int4"`) stores these inputs by that codec
            (`"lossy"` is `"block8"`).
        objective: what a plan within the budget minimises: measured time (`"throughput"`) or `"flops"`.
        optimizer_in_backward: whether each parameter is updated in backward as soon as its gradient is final, so that the
            gradient is freed at once. `"never"`; `"auto"`: the parameters that the budget needs, if that gives the same bits;
            otherwise one line says why not; `"always"`: all parameters, or UpdatesInBackwardError. Nothing may read or write
            `p.grad`, weights or the optimizer's state between that backward and `optimizer.step()`; after it, `p.grad` is
            None. Plain loops must mark the last backward before a step by `with run.last_backward():`.
        profile_steps: number of real training steps that are observed before the plan is solved.
        solver_seconds: time limit of the planner, in seconds of CPU time, so that a busy machine gets the same plans. If no
            plan found by then keeps the budget, the search for small plans goes on. After they are found, the search for faster
            ones lasts at most as long as 50 unmodified steps, but at least 1 second.
        headroom: bytes of the budget that the plan leaves free for memory that observed steps do not show.
        on_exceed: what to do if a planned step was measured above the budget, or no plan for a later step keeps it:
            `"replan"` (put a smaller plan in force), `"warn"` or `"raise"`. If no plan keeps the budget, the smallest plan is
            in force, except with `"raise"`.
        plan: path of a plan file, which is in force from the first step, so that nothing is observed or solved. The plan of
            `memopt fit` is compared with the first step, which is observed, and is in force from the second one.
        pool: `"planned"`: tensors of a planned step get addresses in one arena, which are planned from the requests of the
            previous step (on CUDA: for each stream, not yet tried on a GPU). Requests that differ from the planned ones are
            served by the ordinary allocator, and counted. None: the ordinary allocator serves all requests.
        tile: `"exact"`: where the budget needs it, a loss head (the linear layer before a cross-entropy) runs in tiles, so that
            logits and their gradients are never whole. An observed step compares the bits of tiles with those of the whole ops,
            on this machine, and only sizes that give them are used; if there are none, one line says so. Logits of less than a
            sixteenth of the step's peak stay whole. `"rounding"`: also sizes that differ by rounding, which lowers the peak in
            bfloat16. `"off"`: never.
        compile: compile the model's repeated blocks with `torch.compile` (Inductor) during the run, or the whole model if it
            has none. A model that is already compiled stays as it is. Compiled code rounds differently from eager code.
        verify: compare rebuilt tensors bit by bit with the originals in observed steps, and by checksum in the first planned
            step.
        report: path of a page, `"run.html"`, that is written when the run ends, even by an exception: one file for a browser,
            with pictures and tables of what the plan did. The run's record, which `memopt report` reads, is written next to it
            (`run.json`). None: nothing is written.
        verbose: log progress, and for Lightning, Fabric, Accelerate and Transformers the table when a run ends, by the logger
            `lightning_memopt`: to stderr, or to the program's own handlers.
    """

    budget: str | float | int = "auto"
    max_slowdown: float = 3.0
    recompute: bool = True
    offload: str = "none"
    host_budget: str | float | int | None = None
    disk_budget: str | float | int | None = None
    compress: str = "none"
    objective: Objective = "throughput"
    optimizer_in_backward: EarlyUpdating = "never"
    profile_steps: int = 3
    solver_seconds: float = 30.0
    headroom: int = 0
    on_exceed: OnExceed = "replan"
    plan: str | os.PathLike[str] | None = None
    pool: str | None = None
    tile: str = "exact"
    compile: bool = False
    verify: bool = True
    report: str | os.PathLike[str] | None = None
    verbose: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.profile_steps, int) or self.profile_steps < 1:
            raise ConfigError(f"profile_steps is {self.profile_steps!r}; give the number of steps to observe, 1 or more.")
        if not isinstance(self.solver_seconds, (int, float)) or not self.solver_seconds > 0:
            raise ConfigError(f"solver_seconds is {self.solver_seconds!r}; give a time limit above 0 seconds.")
        if not isinstance(self.max_slowdown, (int, float)) or not self.max_slowdown >= 1:
            raise ConfigError(
                f"max_slowdown is {self.max_slowdown!r}; give a multiple of the unmodified step's seconds, 1.0 or more "
                "(math.inf: the smallest plan, however long it takes)."
            )
        if not isinstance(self.headroom, int) or isinstance(self.headroom, bool) or self.headroom < 0:
            raise ConfigError(f"headroom is {self.headroom!r}; give bytes as an int, 0 or more.")
        if self.on_exceed not in ("replan", "warn", "raise"):
            raise ConfigError(f"on_exceed is {self.on_exceed!r}; use 'replan', 'warn' or 'raise'.")
        if self.objective not in get_args(Objective):
            raise ConfigError(f"objective is {self.objective!r}; use 'throughput' or 'flops'.")
        name, colon, directory = self.offload.partition(":") if isinstance(self.offload, str) else ("", "", "")
        if name not in OFFLOAD or (colon and name != "disk"):
            raise ConfigError(f"offload is {self.offload!r}; use {', '.join(map(repr, OFFLOAD))} or 'disk:/a/directory'.")
        if colon and not directory:
            raise ConfigError(
                f"offload is {self.offload!r}; name a directory after the colon, or use 'disk' for the system's temporary one."
            )
        if self.compress not in (*COMPRESS, *LOSSY):
            raise ConfigError(f"compress is {self.compress!r}; use {', '.join(map(repr, (*COMPRESS, *LOSSY)))}.")
        if self.optimizer_in_backward not in get_args(EarlyUpdating):
            raise ConfigError(
                f"optimizer_in_backward is {self.optimizer_in_backward!r}; use {', '.join(map(repr, get_args(EarlyUpdating)))}."
            )
        if self.pool not in (None, "planned"):
            raise ConfigError(f"pool is {self.pool!r}; use 'planned' or None.")
        if self.tile not in TILE:
            raise ConfigError(f"tile is {self.tile!r}; use {' or '.join(map(repr, TILE))}.")
        if self.report is not None and not _is_page(self.report):
            raise ConfigError(f"report is {self.report!r}; give the path of a page, which ends with .html, or None.")
        if self.objective == "flops" and (self.offload, self.compress) != ("none", "none"):
            raise ConfigError(
                "objective='flops' counts neither copies nor codecs; leave offload and compress out, or objective."
            )
        if self.budget is None:
            raise BudgetError("The budget is None; give bytes like '8GiB', a share like '80%', 'auto' or 'min'.")
        if not self.smallest:
            parse_budget(self.budget, 1 << 62)  # checks only the form: the device, and so the upper limit, is not known yet
        for tier, parks in (("host", name in ("host", "auto")), ("disk", name == "disk")):
            if self.budget_of(tier) is None:
                continue
            self.tier_budget_nbytes(tier, 1 << 62)
            if not parks:
                raise ConfigError(
                    f"{tier}_budget={self.budget_of(tier)!r} limits what is parked in the {tier} tier, and offload is "
                    f"{self.offload!r}, so nothing is. Set offload='{tier}', or leave {tier}_budget out."
                )

    @property
    def offload_to(self) -> tuple[str, str | None]:
        """(tier, or "none" or "auto"; directory of the disk's file, None if none is given)."""
        name, _, directory = self.offload.partition(":")
        return name, os.path.expanduser(directory) or None

    def budget_of(self, tier: str) -> str | float | int | None:
        """The budget of a tier, as it was given."""
        return self.host_budget if tier == "host" else self.disk_budget

    def tier_budget_nbytes(self, tier: str, total_nbytes: int) -> int | None:
        """The budget of a tier in bytes, where there are `total_nbytes`; None if none was given."""
        given = self.budget_of(tier)
        return None if given is None else parse_budget(given, total_nbytes, name=f"{tier}_budget", of=f"the {tier}")

    @property
    def smallest(self) -> bool:
        """Whether the budget is "min"."""
        return isinstance(self.budget, str) and self.budget.strip().lower() == "min"

    def budget_nbytes(self, device: torch.device) -> int | None:
        """The budget in bytes on this device; None for "min", the smallest plan."""
        if self.smallest:
            return None
        from lightning_memopt.device.backends import backend_of  # imports torch, so not at the top

        return parse_budget(self.budget, backend_of(device).total_nbytes())


class PlanOptions(TypedDict, total=False):
    """The options of `MemOptConfig` without the budget, for functions that have their own argument `budget`."""

    max_slowdown: float
    recompute: bool
    offload: str
    host_budget: str | float | int | None
    disk_budget: str | float | int | None
    compress: str
    objective: Objective
    optimizer_in_backward: EarlyUpdating
    profile_steps: int
    solver_seconds: float
    headroom: int
    on_exceed: OnExceed
    plan: str | os.PathLike[str] | None
    pool: str | None
    tile: str
    compile: bool
    verify: bool
    report: str | os.PathLike[str] | None
    verbose: bool


class Options(PlanOptions, total=False):
    """All options of `MemOptConfig`, as keyword arguments."""

    budget: str | float | int


def config_of(config: MemOptConfig | None, options: Mapping[str, Any]) -> MemOptConfig:
    """`config` if it is given, else a config of the options. Raises ConfigError if both are given."""
    if config is None:
        return MemOptConfig(**options)
    if not isinstance(config, MemOptConfig):
        raise ConfigError(f"config is {config!r}; give a MemOptConfig, or the options themselves.")
    if options:
        raise ConfigError(
            f"config= was given together with {', '.join(f'{name}=' for name in options)}. Give one of them: "
            "dataclasses.replace(config, ...) makes a config with other options."
        )
    return config


def changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the defaults of `MemOptConfig`."""
    default = {field.name: field.default for field in fields(MemOptConfig)}
    return {name: value for name, value in options.items() if value != default[name]}


def with_option_texts(cls: type[Decorated]) -> type[Decorated]:
    """A class decorator that puts the texts of all options above at the beginning of `Args:` in the class docstring.

    Command lines (LightningCLI) show these texts. Without docstrings (`python -OO`) it does nothing.
    """
    if cls.__doc__ and MemOptConfig.__doc__:
        texts = MemOptConfig.__doc__.partition("Args:\n")[2].rstrip()
        cls.__doc__ = cls.__doc__.replace("Args:\n", f"Args:\n{texts}\n", 1)
    return cls


def _is_page(path: object) -> bool:
    return isinstance(path, (str, os.PathLike)) and str(os.fspath(path)).endswith(".html")


def disabled() -> bool:
    """Whether `MEMOPT_DISABLE=1` switches the package off: training then runs exactly as without it."""
    return os.environ.get("MEMOPT_DISABLE", "") not in ("", "0")
