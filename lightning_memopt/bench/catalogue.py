"""The rows of a comparison: methods x budgets, and our plans at the peak of each other method.

A budget is a share of what the unmodified step takes above the bytes that are in memory between steps. torch's
`activation_memory_budget` is a share of the same kind, and so is the target of ckptplan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_memopt.bench import methods, ours, torch_compiled
from lightning_memopt.bench.by_ckptplan import by_ckptplan
from lightning_memopt.bench.methods import Opening
from lightning_memopt.bench.subject import Subject

WHOLE = {
    "per-block": methods.per_block,
    "transformers": methods.by_transformers,
    "selective": methods.selective,
    "save-on-cpu": methods.save_on_cpu,
    "streamed-offload": methods.streamed_offload,
}
"""Methods without a budget."""
SHARED: dict[str, Callable[..., Any]] = {
    "torch-eager": partial(torch_compiled.compiled, backend=torch_compiled.EAGER),
    "torch-inductor": partial(torch_compiled.compiled, backend="inductor"),
    "ckptplan": by_ckptplan,
}
"""Other methods that take a share."""
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-flops": {"objective": "flops"},
    "ours-python": {"native": False},
    "ours-inductor": {"compile": True},
    "ours-compiled": {"compiled": True},
    "ours-lossless": {"compress": "lossless"},
    "ours-host": {"offload": "host"},
    "ours-disk": {"compress": "lossless", "offload": "disk"},
    "ours-lossy": {"compress": "lossy"},
}
"""Ours: name -> options of `planned`."""
TITLES = {
    "unmodified": "unmodified",
    "per-block": "checkpointing of each block",
    "transformers": "transformers' gradient_checkpointing",
    "selective": "selective checkpointing",
    "save-on-cpu": "save_on_cpu",
    "streamed-offload": "offload after torchtune, reimplemented",
    "torch-eager": "torch's activation_memory_budget, AOT eager",
    "torch-inductor": "torch's activation_memory_budget, Inductor",
    "ckptplan": "ckptplan, dynamic programming",
    "ours": "ours, native engine",
    "ours-flops": "ours, fewest FLOPs",
    "ours-python": "ours, Python engine",
    "ours-inductor": "ours, blocks compiled by Inductor",
    "ours-compiled": "ours, the whole model compiled by Inductor",
    "ours-lossless": "ours, and lossless codecs",
    "ours-host": "ours, and host memory",
    "ours-disk": "ours, lossless codecs and a disk",
    "ours-lossy": "ours, and lossy codecs",
}
DEFAULT = tuple(name for name in TITLES if name != "ours-lossy")
COMPILE = ("ours-inductor", "ours-compiled")
"""Our methods that compile."""
AT_PEAKS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours-flops": (),
    **dict.fromkeys(COMPILE, ("torch-inductor",)),
    "ours-host": ("save-on-cpu", "streamed-offload"),
}
"""Our methods that also run at the peaks of other methods -> these other methods; (): all of them."""


@dataclass(frozen=True)
class Spec:
    """A row to measure.

    Args:
        method: a name of `TITLES`.
        budget: name of the row's budget; "" if the method takes none.
        opening: opens the method on a subject.
        at: label of the row whose peak is the budget; "" if it is not a peak.
    """

    method: str
    budget: str
    opening: Opening
    at: str = ""

    @property
    def label(self) -> str:
        return f"{self.method} {self.budget}".strip()


def share_of(text: str) -> float:
    """The share that "40%" means. Raises ValueError for anything else, and above 100 %."""
    share = float(text.removesuffix("%")) / 100
    if not text.endswith("%") or not 0 < share <= 1:
        raise ValueError(text)
    return share


def others(names: Sequence[str], budgets: Sequence[str]) -> Iterator[Spec]:
    """The rows of the other methods, without the unmodified step."""
    for name in names:
        if name in WHOLE:
            yield Spec(name, "", WHOLE[name])
    for name in names:
        if name in SHARED:
            whole = ("100%",) if name.startswith("torch") else ()
            for budget in dict.fromkeys((*whole, *budgets)):
                key = "share" if name == "ckptplan" else "memory_budget"
                yield Spec(name, budget, partial(SHARED[name], **{key: share_of(budget)}))


def within(names: Sequence[str], budgets: Sequence[str], solver_seconds: float, activations_nbytes: int) -> Iterator[Spec]:
    """Our methods within the budgets. `activations_nbytes`: bytes of the unmodified step above those between steps."""
    for name in names:
        if name in OURS:
            for budget in budgets:
                yield _ours(name, budget, int(share_of(budget) * activations_nbytes), solver_seconds)


def at_peaks(
    names: Sequence[str], rows: dict[str, dict[str, Any]], solver_seconds: float, activations_nbytes: int
) -> Iterator[Spec]:
    """Our methods at the peak of every other method that lowers it; only once if several have the same peak."""
    first: dict[int, str] = {}
    for label, row in rows.items():
        peak = row.get("peak_nbytes")
        other = row["method"] not in OURS and row["method"] != "unmodified"
        if other and peak is not None and peak < activations_nbytes:
            first.setdefault(peak, label)
    for name, beside in AT_PEAKS.items():
        for peak, label in first.items():
            if name in names and (not beside or rows[label]["method"] in beside):
                yield _ours(name, f"at the peak of {label}", peak, solver_seconds, label)


def _ours(name: str, budget: str, above_nbytes: int, solver_seconds: float, at: str = "") -> Spec:
    options = {"solver_seconds": solver_seconds, **OURS[name]}

    def opening(subject: Subject) -> Any:
        return ours.planned(subject, subject.held_nbytes() + above_nbytes, **options)

    return Spec(name, budget, opening, at)
