"""Break down the bytes of a step by layer and data structure, as tables and plots.

Input: a graph and the lives of a plan; no torch. Output: bytes by (layer, structure) at the peak (`at_peak`), or bytes by
(layer, fate) of all saved tensors (`saved`). Source: Echo (ISCA 2020), section III-B and figures 4, 16, 21, 23: *by layer
types* and *by data structures*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from lightning_memopt.errors import needing
from lightning_memopt.graph import BEFORE, POOLS, Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.peak import STRUCTURES, Breakdown, at_peak, layer_name, layer_of
from lightning_memopt.report.text import Table, render
from lightning_memopt.units import format_nbytes

__all__ = ["COLOURS", "FATES", "STRUCTURES", "Breakdown", "at_peak", "compared", "layer_of", "line", "plot", "saved"]

FATES = ("held", "rebuilt", "there anyway")
"""The fates of a saved tensor. `there anyway`: user code holds it until backward asks for it."""
COLOURS = {
    "outside the step": "#cdbfa8",
    POOLS: "#b8a9c9",
    "weights": "#4e79a7",
    "optimizer state": "#76b7b2",
    "inputs": "#8c8cd9",
    "gradients": "#e15759",
    "feature maps": "#f28e2b",
    "logits": "#ffbe7d",
    "held to rebuild": "#d4b02a",
    "fetched": "#b07aa1",
    "encoded": "#d37295",
    "rebuilt": "#59a14f",
    "generator states": "#9d7660",
    "in use": "#a0a7ae",
    "workspace": "#6b7178",
}
"""Structure -> its colour, the same as on the page of a report (page.js)."""


def saved(graph: Graph, lives: Iterable[Life]) -> Breakdown:
    """Bytes that autograd saves in forward and asks for in backward, by (layer, fate). Each tensor counts once."""
    held = {life.tensor for life in lives if life.how == "original"}
    nbytes: Counter[tuple[str, str]] = Counter()
    for tensor, saves in graph.saves_of.items():
        t = graph.tensors[tensor]
        requests = [p for s in saves for p in s.unpacked_at]
        if not requests or t.born_at == BEFORE:
            continue
        if tensor in held:
            fate = "held"
        elif t.freed_at >= max(requests):
            fate = "there anyway"
        else:
            fate = "rebuilt"
        nbytes[layer_name(graph, t, layer_of), fate] += t.nbytes
    return Breakdown(dict(nbytes))


def line(peak: Breakdown) -> str:
    """The bytes of each structure at the peak, in one line."""
    parts = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in peak.by(1).most_common())
    return f"At the peak: {parts}."


def compared(named: dict[str, Breakdown], axis: int, title: str, most: int = 12) -> str:
    """A table with one column for each breakdown and one row for each layer (axis 0) or structure (axis 1).

    Only the `most` layers with the most bytes have their own row; the last row sums up the others.
    """
    columns = {name: b.by(axis) for name, b in named.items()}
    rows = _rows(columns, axis, most)
    table = Table(title=title)
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for row, names in rows.items():
        table.add_row(row, *(format_nbytes(sum(c[n] for n in names)) for c in columns.values()))
    table.add_row("all", *(format_nbytes(b.total) for b in named.values()))
    return render(table, 140)


def _rows(columns: dict[str, Counter[str]], axis: int, most: int) -> dict[str, list[str]]:
    """Row -> the keys that it sums up: structures in their order; layers by descending bytes, the last ones in one row."""
    if axis == 1:
        return {s: [s] for s in (*STRUCTURES, *FATES) if any(c[s] for c in columns.values())}
    largest: Counter[str] = Counter()
    for c in columns.values():
        largest |= c
    names = [name for name, _ in largest.most_common()]
    rows = {name: [name] for name in names[:most]}
    if len(names) > most:
        rows[f"{len(names) - most} others"] = names[most:]
    return rows


def plot(named: dict[str, Breakdown], path: Path, title: str, most: int = 8) -> None:
    """Write a picture with stacked bars by layer and by structure to `path`. Raises MissingExtraError without matplotlib."""
    with needing("bench", "Pictures need"):
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 4.5))
    for axis, (ax, kind) in enumerate(zip(axes, ("layer", "data structure"), strict=True)):
        columns = {name: b.by(axis) for name, b in named.items()}
        bottom = [0.0] * len(columns)
        for row, names in _rows(columns, axis, most).items():
            mib = [sum(c[n] for n in names) / 2**20 for c in columns.values()]
            ax.bar(list(columns), mib, bottom=bottom, label=row, color=COLOURS.get(row) if axis else None)
            bottom = [b + m for b, m in zip(bottom, mib, strict=True)]
        ax.set(title=f"{title}, by {kind}", ylabel="MiB at the peak", ylim=(0, 1.05 * max(bottom) or 1))
        ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
