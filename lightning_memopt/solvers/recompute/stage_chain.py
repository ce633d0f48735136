"""Optimal recomputation of a real model: cut it into a chain of stages, find options by minimum cuts, solve the chain, make
lives.

For each stage, `mincut` gives the Pareto set of ways to hold it (from keeping everything, over Echo-like cuts, to the input
only). The simulator prices each on the stage's own stretch of the observed backward. `chain.solve_chain` decides in which way
each stage is held, and which boundaries are held, dropped and rebuilt; `lives` turns its checkpoint tree into lives. The result
is exact among memory-persistent schedules of this chain and these options, within the bucket size; `simulate` prices it on the
whole graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.graph import Graph, base_levels, workspaces
from lightning_memopt.plan import Life, lower, simulate
from lightning_memopt.solvers import chain as dp
from lightning_memopt.solvers.recompute.mincut import HoldOrRebuild
from lightning_memopt.solvers.recompute.stages import Stages, StageSpan
from lightning_memopt.solvers.rollout import Rollout


@dataclass(frozen=True, eq=False)
class ModelChain:
    """A chain problem and, for each stage and option, the tensors that the option holds."""

    stages: Stages
    chain: dp.Chain
    held: tuple[tuple[frozenset[int], ...], ...]

    @property
    def graph(self) -> Graph:
        return self.stages.graph


def _nbytes(graph: Graph, tensors: frozenset[int] | set[int]) -> int:
    return sum(graph.tensors[t].nbytes for t in tensors)


def _sweep(graph: Graph, stages: Stages, span: StageSpan, wanted: frozenset[int]) -> tuple[float, int]:
    """Seconds and peak bytes (beyond the input) of running the stage again to make `wanted` from its input."""
    roll = Rollout(graph, ())
    ops = roll.closure(wanted, set(stages.given | span.enters))
    last = {t: o for o in ops for t in graph.ops[o].inputs}
    live: dict[int, int] = {}
    now = peak = 0
    for o in ops:
        op = graph.ops[o]
        for old, _ in op.mutates:
            now -= live.pop(old, 0)
        for t in op.outputs:
            live[t] = graph.tensors[t].nbytes
            now += live[t]
        peak = max(peak, now + op.workspace_nbytes)
        for t in [*op.inputs, *op.outputs]:
            if t in live and (t in op.unrebuilt or (t not in wanted and last.get(t, -1) <= o)):
                now -= live.pop(t)
    return sum(graph.ops[o].seconds for o in ops), peak


def _backward(graph: Graph, stages: Stages, span: StageSpan, have: frozenset[int]) -> tuple[float, int]:
    """Seconds of rebuilding and absolute peak bytes (beyond the input) of the stage's backward, with `have` held."""
    roll = Rollout(graph, span.saves)
    roll.serve(span.unpacks, set(have | stages.given | span.enters))
    outside = span.enters | stages.given
    everything = roll.lives()
    schedule = lower(graph, everything)
    lives = [life for life in everything if life.tensor not in outside]
    timeline = simulate(graph, lives, schedule, window=(span.begins_at, span.ends_at))
    return timeline.predicted.extra_seconds, timeline.predicted.peak_nbytes


def build(stages: Stages, options: int = 8) -> ModelChain:
    """Price every stage and its options."""
    graph = stages.graph
    base, extra = base_levels(graph), workspaces(graph)
    ambient = _nbytes(graph, {t for t in stages.given if graph.saves_of.get(t) or graph.consumers.get(t)})
    priced_stages, held_sets = [], []
    for span in stages.spans:
        free = stages.given | span.enters | span.leaves
        needed = [save.tensor for save in span.saves if save.unpacked_at]
        held_sets_of_cuts = [c.held for c in HoldOrRebuild(graph, needed, free).hull(options).vertices]
        keep = frozenset(t for t in needed if t not in free and t in graph.producers and t not in graph.overwritten)
        choices = list(dict.fromkeys([keep, *held_sets_of_cuts]))
        sweep_seconds, sweep_peak = _sweep(graph, stages, span, span.leaves)
        rebuild_seconds, rebuild_peak = _backward(graph, stages, span, frozenset())
        priced = []
        for held in choices:
            rerun_seconds, rerun_peak = _sweep(graph, stages, span, span.leaves | held)
            backward_seconds, backward_peak = _backward(graph, stages, span, held | span.leaves)
            priced.append(
                dp.Option(
                    name=f"holds {len(held)}",
                    held_nbytes=_nbytes(graph, held),
                    rerun_seconds=rerun_seconds,
                    rebuild_seconds=backward_seconds,
                    forward_peak_nbytes=rerun_peak,
                    backward_peak_nbytes=backward_peak + ambient,
                )
            )
        leaves = _nbytes(graph, span.leaves)
        ops = [graph.ops[o] for o in range(span.first, span.last + 1)]
        natural = max((base[op.at] + extra[op.at] for op in ops), default=0)
        # the base already has these bytes for the user's own forward; a rebuild must allocate them
        overlap = min([sweep_peak - leaves, *(o.forward_peak_nbytes - o.held_nbytes - leaves for o in priced)])
        priced_stages.append(
            dp.Stage(
                name=_name(graph, span),
                input_nbytes=_nbytes(graph, span.enters),
                sweep_seconds=sweep_seconds,
                sweep_peak_nbytes=sweep_peak,
                rebuild_seconds=rebuild_seconds,
                rebuild_peak_nbytes=rebuild_peak + ambient,
                forward_base_nbytes=max(0, natural - max(0, overlap)) + ambient,
                backward_base_nbytes=base[span.begins_at] + ambient,
                options=tuple(priced),
            )
        )
        held_sets.append(tuple(choices))
    return ModelChain(stages, dp.Chain(stages=tuple(priced_stages)), tuple(held_sets))


def _name(graph: Graph, span: StageSpan) -> str:
    first, last = graph.ops[span.first].scope, graph.ops[span.last].scope
    return first if first == last else f"{first}..{last}"


def lives(model: ModelChain, tree: dp.CheckpointTree) -> tuple[Life, ...]:
    """The lives of a checkpoint tree: walk it in the order of backward, with its runs at each stage's first unpack."""
    graph, stages = model.graph, model.stages
    roll = Rollout(graph)
    given = set(stages.given)
    last = len(stages.spans) - 1
    # (node, or the unpacks of a stage with the tensors held for it; the stage whose backward comes next)
    stack: list[tuple[dp.CheckpointTree | tuple[StageSpan, frozenset[int]], int]] = [(tree, last)]
    while stack:
        node, t = stack.pop()
        runs_again = t < last  # before that it is the user's own forward
        if isinstance(node, dp.Checkpoint):
            if runs_again:
                for k in range(node.first, node.at):
                    span = stages.spans[k]
                    roll.run(stages.spans[t].begins_at, roll.closure(span.leaves, given | set(span.enters)))
            stack.append((node.left, node.at - 1))
            stack.append((node.right, t))
        elif isinstance(node, dp.Hold):
            span, held = stages.spans[node.stage], model.held[node.stage][node.option]
            wanted = held | (span.leaves if node.rest is not None else frozenset())
            if runs_again:
                roll.run(stages.spans[t].begins_at, roll.closure(wanted, given | set(span.enters)))
            stack.append(((span, wanted), t))
            if node.rest is not None:
                stack.append((node.rest, t))
        elif isinstance(node, dp.Rebuild):
            stack.append(((stages.spans[node.stage], frozenset()), t))
        else:
            span, have = node
            roll.serve(span.unpacks, given | set(span.enters) | set(have))
    return roll.lives()


__all__ = ["ModelChain", "build", "lives"]
