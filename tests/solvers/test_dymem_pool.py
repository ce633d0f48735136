"""The comparison of pools on Dymem's networks: the same requests, and the paper's groups."""

from __future__ import annotations

from benchmarks.models.papers.networks import network
from benchmarks.papers.dymem_pool import groups, measure, requested, table
from benchmarks.papers.transfer_papers import EFFICIENCY, PROFILE
from lightning_memopt.graph import Graph
from lightning_memopt.plan.rates import profile
from lightning_memopt.solvers.placement import buffers_of


def resnet() -> Graph:
    device = profile(PROFILE).device
    assert device is not None
    return network("ResNet-32, no norm", 4, device, EFFICIENCY)


def test_forks_and_joins_are_temporary_and_the_classifier_is_reclaimed() -> None:
    """Figure 10: what a block begins with is read by its two branches; the shortcut waits for the other branch."""
    graph = resnet()
    group = groups(graph)
    for op in graph.forward:
        readers = [r.id for r in graph.consumers.get(op.outputs[0], ()) if r.phase == "forward"]
        if op.name in ("aten::addmm", "aten::_log_softmax"):
            assert group[op.outputs[0]] == "reclaimed"
        elif len(readers) > 1:
            assert group[op.outputs[0]] == "temporary"
        elif readers == [op.id + 1]:
            assert group[op.outputs[0]] == "movable"
    assert sum(g == "temporary" for t, g in group.items() if graph.producers[t].phase == "forward") >= 15


def test_all_pools_serve_the_requests_of_the_step() -> None:
    graph = resnet()
    buffers, mobilities = requested(graph, None)
    assert len(buffers) == len(mobilities)
    key = sorted((b.lower, b.size) for b in buffers)
    assert key == sorted((b.lower, b.size) for b in buffers_of(graph))


def test_no_pool_is_smaller_than_what_is_alive() -> None:
    rows = measure("AlexNet", 8, seconds=2)
    assert [row["maps"] for row in rows] == ["kept", "parked by vDNN", "parked by Dymem"]
    for row in rows:
        sizes = row["pool_nbytes"]
        assert all(size >= row["max_live_nbytes"] for size in sizes.values())
        assert sizes["planned"] <= min(sizes["one end"], sizes["GTBM"])
    assert table(rows).count("\n") == 4
