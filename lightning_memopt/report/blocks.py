"""A plan by blocks of the model: what each keeps, rebuilds and parks, what that costs, and why. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Plan
from lightning_memopt.report.fates import Fate, fates, operator, runs_again, summed
from lightning_memopt.report.text import Table, render
from lightning_memopt.units import format_nbytes

WIDTH = 140


def block_of(scope: str) -> str:
    """The block of a module ("module.path#call"): its path up to the first number, or the whole path if it has no number.

    `h.3.mlp#1` is in `h.3`, `lm_head` in `lm_head`.
    """
    parts = scope.partition("#")[0].split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1]) or "the model itself"


@dataclass
class Block:
    """One block.

    name: path of the block.
    fates: the fates of the tensors that its ops make.
    extra_seconds: seconds of its ops that run again; an op that runs again twice counts twice.
    """

    name: str
    fates: list[Fate] = field(default_factory=list)
    extra_seconds: float = 0.0

    def nbytes(self, what: str) -> int:
        return sum(fate.tensor.nbytes for fate in self.fates if fate.what == what)

    @property
    def why(self) -> str:
        """For each fate, the reason for most of the bytes that have it."""
        parts = []
        for what in ("rebuilt", "parked", "kept"):
            mine = [fate for fate in self.fates if fate.what == what]
            for why, *_ in summed(mine, lambda fate: fate.why)[:1]:
                names = [name for name, *_ in summed((f for f in mine if f.why == why), lambda f: operator(f.op.name))]
                parts.append(f"{what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, {why}")
        return "; ".join(parts) or "autograd saves none of its tensors"


def blocks(graph: Graph, plan: Plan) -> list[Block]:
    """The blocks whose ops make tensors that matter to the plan, or run again, in the order of the forward."""
    by_name: dict[str, Block] = {}
    for op in graph.forward:
        by_name.setdefault(block_of(op.scope), Block(block_of(op.scope)))
    for fate in fates(graph, plan):
        name = block_of(fate.op.scope)
        by_name.setdefault(name, Block(name)).fates.append(fate)
    for op_id, times in runs_again(graph, plan).items():
        by_name[block_of(graph.ops[op_id].scope)].extra_seconds += times * graph.ops[op_id].seconds
    return [block for block in by_name.values() if block.fates or block.extra_seconds]


def by_block(rows: Iterable[Block]) -> str:
    """A table with one row for each block, and their sum."""
    rows = list(rows)
    table = Table(title="What each block keeps, rebuilds and parks")
    table.add_column("block")
    for column in ("kept", "rebuilt", "parked", "extra ms"):
        table.add_column(column, justify="right")
    table.add_column("why")

    def sizes(chosen: list[Block]) -> list[str]:
        totals = (sum(block.nbytes(what) for block in chosen) for what in ("kept", "rebuilt", "parked"))
        return [*(format_nbytes(n) if n else "-" for n in totals), f"{1e3 * sum(b.extra_seconds for b in chosen):.2f}"]

    for block in rows:
        table.add_row(block.name, *sizes([block]), block.why)
    table.add_row("all", *sizes(rows), "")
    return render(table, WIDTH)
