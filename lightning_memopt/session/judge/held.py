"""Bytes that the rest of the program holds on the device during a step: an EMA copy or a buffer may grow while a plan runs."""

from __future__ import annotations

import dataclasses

from lightning_memopt.graph import BEFORE, OUTSIDE, Graph, Tensor
from lightning_memopt.plan import Plan


def with_held(graph: Graph, nbytes: int) -> Graph:
    """The graph of a step during which `nbytes` more are held from its beginning to its end."""
    if not nbytes:
        return graph
    id = len(graph.tensors)
    held = Tensor(
        id=id,
        name=OUTSIDE,
        nbytes=nbytes,
        kind="temporary",
        storage=id,
        born_at=BEFORE,
        freed_at=len(graph.points) - 1,
    )
    return dataclasses.replace(graph, tensors=(*graph.tensors, held))


def beside(plan: Plan, nbytes: int) -> Plan:
    """The plan with `nbytes` more in memory at every point, and with a budget that is larger by the same amount."""
    if not nbytes:
        return plan
    reserved = plan.predicted.reserved_nbytes
    predicted = dataclasses.replace(
        plan.predicted,
        peak_nbytes=plan.predicted.peak_nbytes + nbytes,
        reserved_nbytes=reserved + nbytes if reserved else 0,
    )
    return dataclasses.replace(
        plan,
        predicted=predicted,
        budget_nbytes=plan.budget_nbytes + nbytes,
        unmodified_peak_nbytes=plan.unmodified_peak_nbytes + nbytes,
    )
