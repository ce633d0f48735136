"""The fate of each tensor under a plan, and the reason. Input: a graph and a plan. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_memopt.graph import Graph, Op, Tensor
from lightning_memopt.plan import Life, Plan, lower
from lightning_memopt.plan.forms import codec_of, tier_of
from lightning_memopt.units import format_nbytes

What = Literal["kept", "rebuilt", "parked", "never read"]
_MOST = 4
"""Maximum number of entries in one line."""


def operator(name: str) -> str:
    """`"aten::addmm.out"` -> `"addmm"`."""
    return name.rpartition("::")[2].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of a tensor that autograd saves, or that the plan holds or rebuilds for other tensors.

    tensor, op: the tensor, and the op that made it.
    saved: whether autograd saves it.
    what: what happens to it. `never read`: autograd saves it but never asks for it, so nothing holds it.
    why: the reason, in words.
    lives: its lives in the plan, in order.
    """

    tensor: Tensor
    op: Op
    saved: bool
    what: What
    why: str
    lives: tuple[Life, ...]


def fates(graph: Graph, plan: Plan) -> list[Fate]:
    """The fates, by id, of all tensors that an op of the step makes and that autograd saves or the plan has lives of."""
    lives: dict[int, list[Life]] = {}
    for life in plan.lives:
        lives.setdefault(life.tensor, []).append(life)
    any_recomputable = any(op.recomputable for op in graph.forward)  # false with recompute=False
    starts = {t for op_id in runs_again(graph, plan) for t in graph.ops[op_id].inputs}
    entries = []
    for tensor in sorted(lives.keys() | graph.saves_of.keys()):
        op = graph.producers.get(tensor)
        if op is not None:
            mine = tuple(lives.get(tensor, ()))
            what, why = _fate(graph, graph.tensors[tensor], op, mine, any_recomputable, tensor in starts)
            entries.append(Fate(graph.tensors[tensor], op, tensor in graph.saves_of, what, why, mine))
    return entries


def _fate(graph: Graph, t: Tensor, op: Op, lives: tuple[Life, ...], any_recomputable: bool, start: bool) -> tuple[What, str]:
    """`start`: whether an op that runs again reads the tensor."""
    form = next((life.form for life in lives if life.how == "fetch"), "")
    if form:
        return "parked", f"{_form_text(form)} until backward asks for it"
    if any(life.how == "rebuild" for life in lives):
        return "rebuilt", "heavy to rebuild, but the budget needs its bytes" if op.heavy else "light to rebuild"
    if not lives and not any(save.unpacked_at for save in graph.saves_of.get(t.id, ())):
        return "never read", "backward never asks for it"
    if not any_recomputable:
        return "kept", "no op of this step runs again"
    if not op.recomputable:
        return "kept", f"{operator(op.name)} is not run again"
    if t.id in op.unrebuilt:
        return "kept", f"{operator(op.name)} does not write all of it again"
    if t.freed_at > graph.backward_begins:
        return "kept", "the user holds it anyway"
    if start:
        return "kept", "rebuilds start from it"
    return "kept", "heavy to rebuild" if op.heavy else "the budget has room for it"


def _form_text(form: str) -> str:
    codec, tier = codec_of(form), tier_of(form)
    where = {"disk": "on the disk", "host": "in the host's memory", "": "on the device"}.get(tier, tier)
    return f"encoded by {codec}, {where}" if codec else where


def summed(entries: Iterable[Fate], key: Callable[[Fate], str]) -> list[tuple[str, int, int]]:
    """(key, number of tensors, bytes), most bytes first."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for fate in entries:
        count[key(fate)] += 1
        nbytes[key(fate)] += fate.tensor.nbytes
    return [(name, count[name], total) for name, total in nbytes.most_common()]


def items(entries: list[tuple[str, int, int]]) -> str:
    """The first `_MOST` entries of `summed` as one line."""
    return ", ".join(f"{name} x{n} ({format_nbytes(b)})" for name, n, b in entries[:_MOST]) or "nothing"


def rebuilt(graph: Graph, plan: Plan) -> list[tuple[str, int, int]]:
    """(operator, number of tensors, bytes) of the saved tensors that are rebuilt, most bytes first."""
    again = {life.tensor for life in plan.lives if life.how == "rebuild"}
    chosen = (fate for fate in fates(graph, plan) if fate.saved and fate.tensor.id in again)
    return summed(chosen, lambda fate: operator(fate.op.name))


def kept(graph: Graph, plan: Plan) -> list[tuple[str, int, int]]:
    """(reason, number of tensors, bytes) of the saved tensors that the plan keeps, most bytes first."""
    return summed((fate for fate in fates(graph, plan) if fate.saved and fate.what == "kept"), lambda fate: fate.why)


def runs_again(graph: Graph, plan: Plan) -> Counter[int]:
    """Id of an op -> how often a step runs it again."""
    return Counter(lower(graph, plan.lives).runs)
