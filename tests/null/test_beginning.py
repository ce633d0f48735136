"""The model of the allocator begins with segments that were found, and takes the requests of an op as they were recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from build import Step

from lightning_memopt.graph import OUTSIDE, Graph, Op, Point, Tensor
from lightning_memopt.plan.allocator import Allocator, Beginning
from lightning_memopt.plan.allocator.beginning import Wanted
from lightning_memopt.plan.allocator.reserved import requests, reserved
from lightning_memopt.plan.allocator.settings import MIB, Settings
from lightning_memopt.solvers.rollout import keep_all

Found = tuple[int, bool] | tuple[int, bool, int]
"""Bytes, whether it is held, and what was asked for."""


def segment(address: int, *blocks: Found, **more: Any) -> dict[str, Any]:
    """As torch's snapshot has it."""
    listed = [
        {"size": nbytes, "state": "active_allocated" if held else "inactive", "requested_size": asked[0] if asked else nbytes}
        for nbytes, held, *asked in blocks
    ]
    total = sum(int(b["size"]) for b in listed)
    kind = "large" if total > 2 * MIB else "small"
    return {"address": address, "total_size": total, "stream": 0, "segment_type": kind, "blocks": listed} | more


def entered(*segments: dict[str, Any], **settings: Any) -> Allocator:
    allocator = Allocator(Settings(**settings))
    beginning = Beginning(segments, {s["address"]: "parameter" for s in segments})
    held = [s for s in segments if s["blocks"][0]["state"] != "inactive"]
    wanted = [Wanted(i, int(s["blocks"][0]["requested_size"]), "parameter") for i, s in enumerate(held)]
    assert beginning.enter(allocator, wanted, ()) == []
    return allocator


def test_free_blocks_between_held_ones_serve_first() -> None:
    allocator = entered(segment(0, (4 * MIB, True), (6 * MIB, False), (2 * MIB, True), (8 * MIB, False)))
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 4 * MIB), "what no tensor is in is freed, and joined"
    allocator.alloc("a", 16 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.alloc("b", 2 * MIB)
    assert allocator.reserved == 40 * MIB
    for name in ("a", "b", 0):
        allocator.free(name)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0


def test_a_tensor_is_in_a_block_of_its_kind_and_of_what_it_asked_for() -> None:
    """A large block may have up to 1 MiB more than was asked for. Gradients are freed, though they are as large as weights."""
    found = segment(0, (3 * MIB, True, 2 * MIB + 512), (3 * MIB, True, 2 * MIB + 512), (14 * MIB, False))
    kinds: dict[int, Any] = {0: "gradient", 3 * MIB: "parameter"}
    allocator = Allocator()
    assert Beginning([found], kinds).enter(allocator, [Wanted(7, 2 * MIB + 512, "parameter")], ()) == []
    assert allocator.allocated == 3 * MIB and allocator.requested == 2 * MIB + 512
    allocator.alloc("instead of the gradient", 3 * MIB)
    allocator.alloc("behind", 14 * MIB)
    assert allocator.reserved == 20 * MIB


def test_what_has_no_block_is_told_and_unseen_bytes_keep_theirs() -> None:
    found = segment(0, (8 * MIB, True), (4 * MIB, True), (8 * MIB, False))
    unseen = Wanted(1, 9 * MIB, "temporary")
    allocator = Allocator()
    missing = Beginning([found], {}).enter(allocator, [Wanted(0, 3 * MIB, "input")], [unseen])
    assert missing == [Wanted(0, 3 * MIB, "input"), Wanted(1, MIB, "temporary")]
    assert allocator.allocated == 8 * MIB, "the workspace of 8 MiB stays, the rest is freed"


def test_bytes_that_a_sum_was_rounded_up_by_take_no_block() -> None:
    """A counter of 8 bytes beside the step is told as 512: with a block of its own, the rest would fill a hole that is free."""
    found = segment(0, (2 * MIB - 1024, False), (8, True), (512, False))
    allocator = Allocator()
    assert Beginning([found], {}).enter(allocator, (), [Wanted(0, 512, "temporary")]) == []


def test_of_equal_blocks_that_of_the_segment_told_first_serves() -> None:
    first, second = segment(64 * MIB, (4 * MIB, False), (20 * MIB, True)), segment(0, (4 * MIB, False), (40 * MIB, True))
    for told, kept in (((first, second), 24), ((second, first), 44)):
        allocator = Allocator()
        wanted = [Wanted(0, 20 * MIB, "parameter"), Wanted(1, 40 * MIB, "parameter")]
        assert Beginning(told, {}).enter(allocator, wanted, ()) == []
        allocator.alloc("a", 4 * MIB)
        for name in (0, 1):
            allocator.free(name)
        allocator.empty_cache()
        assert allocator.reserved == kept * MIB, "the segment that serves stays"


def test_a_full_segment_serves_first_or_last_once_its_gradient_is_freed() -> None:
    """Either segment may serve the next tensor. The one that does stays, and the other may be freed."""
    full = segment(0, (4 * MIB, True), (16 * MIB, True), (20 * MIB, True))
    other = segment(64 * MIB, (4 * MIB, False), (40 * MIB, True))
    kinds: dict[int, Any] = {0: "gradient", 4 * MIB: "parameter", 20 * MIB: "optimizer_state", 68 * MIB: "parameter"}
    wanted = [Wanted(0, 16 * MIB, "parameter"), Wanted(1, 20 * MIB, "optimizer_state"), Wanted(2, 40 * MIB, "parameter")]
    beginning = Beginning([other, full], kinds)
    assert beginning.orders == 2 and Beginning([other, full], kinds | {0: "buffer"}).orders == 1
    kept = []
    for order in range(2):
        allocator = Allocator()
        assert beginning.enter(allocator, wanted, (), order) == []
        allocator.alloc("a", 4 * MIB)
        for name in range(3):
            allocator.free(name)
        allocator.empty_cache()
        kept.append(allocator.reserved // MIB)
    assert kept == [44, 40], "the segment that serves stays"


def test_the_order_with_the_higher_peak_counts() -> None:
    """A step takes 4 MiB, from the hole of the one segment or of the other. Then the batch is freed beside the other hole, and
    18 MiB have room there, or not.
    """
    step = Step(device="cuda")
    weight, batch = step.given(16 * MIB), step.given(5 * MIB, "input")
    (a,) = step.op(weight, batch, makes=(4 * MIB,), saves=("out",))
    step.op(a, makes=(18 * MIB,))
    graph = step.build(gradient=512)
    graph = replace(graph, tensors=tuple(replace(t, freed_at=0) if t.id == batch else t for t in graph.tensors))
    full = segment(0, (4 * MIB, True), (16 * MIB, True))
    other = segment(64 * MIB, (4 * MIB, False), (5 * MIB, True), (11 * MIB, False))
    kinds: dict[int, Any] = {0: "gradient", 4 * MIB: "parameter", 68 * MIB: "input"}
    known = [segment(0, (4 * MIB, False), (16 * MIB, True)), other]
    first, last = (
        reserved(graph, keep_all(graph), beginning=Beginning(told, kinds)).peak_nbytes for told in (known, known[::-1])
    )
    assert last - first == 18 * MIB
    for told in ([full, other], [other, full]):
        assert reserved(graph, keep_all(graph), beginning=Beginning(told, kinds)).peak_nbytes == last


def test_tensors_without_bytes_take_no_block() -> None:
    """The optimizer's step counter is on the host. In the graph it has no bytes on the device."""
    allocator = Allocator()
    wanted = [Wanted(0, 0, "optimizer_state"), Wanted(1, 512, "optimizer_state")]
    beginning = Beginning([segment(0, (512, True), (2 * MIB - 512, False))], {0: "optimizer_state"})
    assert beginning.enter(allocator, wanted, ()) == [] and allocator.allocated == 512


def test_private_pools_only_take_bytes() -> None:
    allocator = entered(segment(0, (20 * MIB, True)), segment(64 * MIB, (20 * MIB, False), segment_pool_id=(0, 1)))
    assert allocator.reserved == 40 * MIB
    allocator.alloc("a", 4 * MIB)
    assert allocator.reserved == 60 * MIB


def test_an_expandable_segment_goes_on_behind_its_pages_and_in_its_gaps() -> None:
    page = 20 * MIB
    two = segment(0, (page, True), is_expandable=True), segment(3 * page, (page, True), is_expandable=True)
    allocator = entered(*two, expandable=True)
    allocator.alloc("in the gap", 2 * page)
    assert allocator.reserved == 4 * page
    allocator.alloc("behind", page)
    assert allocator.reserved == 5 * page
    allocator.free("in the gap")
    allocator.empty_cache()
    assert allocator.reserved == 3 * page


def product(workspace: int, asked: tuple[int, ...] | None) -> Graph:
    """One op that makes 1 MiB beside a workspace, from 512 bytes."""
    step = Step(device="cuda")
    step.op(step.given(512), makes=(MIB,), workspace=workspace)
    return replace(step.build(), asked={} if asked is None else {0: asked})


def test_blocks_of_a_workspace_come_from_the_pools_of_their_sizes() -> None:
    small = product(2 * MIB, (MIB, MIB, MIB, -1, -3))  # the result is the second
    whole = product(2 * MIB, None)
    assert [n for _, n in requests(small)][:5] == [MIB, MIB, MIB, -1, -1]
    assert requests(small)[1] == requests(whole)[0], "the result has its name in its place"
    assert reserved(whole, keep_all(whole)).peak_nbytes == (2 + 20) * MIB, "one block of 2 MiB is a large one"
    assert reserved(small, keep_all(small)).peak_nbytes == 4 * MIB
    assert reserved(small, keep_all(small)).requested_nbytes == reserved(whole, keep_all(whole)).requested_nbytes


def test_what_the_record_does_not_explain_is_allocated_all_the_same() -> None:
    """A result of another size than in the recorded step (`roomy`)."""
    other = product(0, (512, 4096))
    assert [n for _, n in requests(other) if n > 0] == [MIB]


def test_a_plan_is_priced_from_the_beginning() -> None:
    graph = product(0, None)
    unseen = Tensor(id=2, name=OUTSIDE, nbytes=8 * MIB, kind="temporary", storage=2, born_at=-1, freed_at=len(graph.points) - 1)
    graph = replace(graph, tensors=(*graph.tensors[:2], unseen))
    found = [segment(0, (512, True), (2 * MIB - 512, False)), segment(32 * MIB, (8 * MIB, True), (12 * MIB, False))]
    priced = reserved(graph, keep_all(graph), beginning=Beginning(found, {0: "parameter"}))
    assert (priced.peak_nbytes, priced.allocated_nbytes) == (22 * MIB, 9 * MIB + 512)


@pytest.mark.parametrize("held", [False, True])
def test_a_bias_is_added_in_place_where_nobody_else_holds_the_product(held: bool) -> None:
    tensors = [
        Tensor(id=i, name=name, nbytes=4 * MIB, kind=kind, storage=i, born_at=born, freed_at=freed)  # type: ignore[arg-type]
        for i, (name, kind, born, freed) in enumerate(
            [("x", "input", -1, 1), ("bias", "parameter", -1, 1), ("product", "activation", 0, 1), ("sum", "activation", 1, 1)]
        )
    ]
    ops = (
        Op(id=0, name="aten::mm", phase="forward", inputs=(0,), outputs=(2,), at=0),
        Op(id=1, name="aten::add.Tensor", phase="forward", inputs=(2, 1), outputs=(3,), at=1),
    )
    points = [Point("op", 0), Point("op", 1)]
    if held:
        ops = (*ops, Op(id=2, name="aten::relu", phase="forward", inputs=(2,), outputs=(), at=2))
        points.append(Point("op", 2))
        tensors = [replace(t, freed_at=2) for t in tensors]
    graph = Graph(ops=ops, tensors=tuple(tensors), saves=(), points=tuple(points), device="cuda")
    assert graph.biased == ({} if held else {1: 2})
    assert reserved(graph, ()).requested_nbytes == (16 if held else 12) * MIB
