"""Where the bytes of a step are, in tables and plots: at the peak of a plan, and over all that autograd saves.

Input: a graph and the lives of a plan, no torch. Output: a table of bytes by (layer, structure). Source: Echo (ISCA 2020),
section III-B and figures 4, 16, 21, 23: *by layer types* and *by data structures*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from lightning_memopt.graph import BEFORE, Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.peak import STRUCTURES, Breakdown, LayerOf, at_peak, layer_name, layer_of
from lightning_memopt.report.text import Table, render
from lightning_memopt.units import format_nbytes

__all__ = ["FATES", "STRUCTURES", "Breakdown", "at_peak", "compared", "layer_of", "line", "plot", "saved"]

FATES = ("held", "rebuilt", "there anyway")
"""What becomes of what autograd saves; `there anyway`: user code holds it until backward asks."""


def saved(graph: Graph, lives: Iterable[Life], layer: LayerOf = layer_of) -> Breakdown:
    """All bytes that autograd saves and asks for, by layer and fate; each tensor once."""
    held = {life.tensor for life in lives if life.how == "original"}
    found: Counter[tuple[str, str]] = Counter()
    for tensor, saves in graph.saves_of.items():
        t = graph.tensors[tensor]
        requests = [p for s in saves for p in s.unpacked_at]
        if not requests or t.born_at == BEFORE:
            continue
        fate = "held" if tensor in held else "there anyway" if t.freed_at >= max(requests) else "rebuilt"
        found[layer_name(graph, t, layer), fate] += t.nbytes
    return Breakdown(dict(found))


def line(found: Breakdown) -> str:
    """What is in memory at the peak, in one line, by structure."""
    parts = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in found.by(1).most_common())
    return f"At the peak: {parts}."


def compared(named: dict[str, Breakdown], axis: int, title: str, most: int = 12) -> str:
    """A table of breakdowns beside each other: a row a layer (axis 0), or a structure (axis 1)."""
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
    """Row -> the keys it sums up: structures in their order, layers by their largest bytes, the last ones together."""
    if axis == 1:
        return {s: [s] for s in (*STRUCTURES, *FATES) if any(c[s] for c in columns.values())}
    largest: Counter[str] = Counter()
    for c in columns.values():
        largest |= c
    names = [name for name, _ in largest.most_common()]
    rows = {name: [name] for name in names[:most]}
    return rows | ({f"{len(names) - most} others": names[most:]} if len(names) > most else {})


def plot(named: dict[str, Breakdown], path: Path, title: str, most: int = 8) -> None:
    """Stacked bars by layer and by structure. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5))
    for axis, (ax, kind) in enumerate(zip(axes, ("layer", "data structure"), strict=True)):
        columns = {name: b.by(axis) for name, b in named.items()}
        bottom = [0.0] * len(columns)
        for row, names in _rows(columns, axis, most).items():
            mib = [sum(c[n] for n in names) / 2**20 for c in columns.values()]
            ax.bar(list(columns), mib, bottom=bottom, label=row)
            bottom = [b + m for b, m in zip(bottom, mib, strict=True)]
        ax.set(title=f"{title}, by {kind}", ylabel="MiB at the peak")
        ax.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
