"""Encoded and decoded tensors as our plans allocate them, beside an arena and buffers that are there all the time.

    python -m benchmarks arena [--models digits,chargpt] [--times 8]

Of recorded steps of the two demo models, at eight times their batch, with all that `compress` may encode away; bytes of the
whole step:

- ours: every encoded tensor is allocated when its tensor leaves and freed when it is decoded, every decoded one from then on
  until backward has let go of it;
- arena: encoded tensors lie in one piece of memory that is there for the whole step, each behind the last that is still
  used (FreeLunch, III-B: a stack). What is freed below the top stays a hole until all above it is free;
- buffers: what is decoded lies in buffers of the size of the largest, for the whole step (III-C), as many as are used at once.

The peak is that of bytes asked for (`simulate`); reserved is what CUDA's caching allocator takes for them (plan/allocator),
with its own segments and with expandable ones. CPU graphs: sizes and order are those of the device's, but for workspaces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from unittest import mock

import torch

from benchmarks.offload.lossy import MODELS, TITLES, eligible, everything_away, observed
from lightning_memopt.graph import BEFORE, Graph, Tensor
from lightning_memopt.plan import Life, simulate
from lightning_memopt.plan.allocator.reserved import _Step, reserved
from lightning_memopt.plan.allocator.settings import Settings
from lightning_memopt.plan.simulate import encoded

MIB = 2**20


@dataclass(frozen=True)
class Stack:
    """What a stack of encoded tensors needs. `out_of_order`: frees that are not at its top; `hole_nbytes`: most in holes."""

    high_nbytes: int
    count: int
    out_of_order: int
    hole_nbytes: int


def stacked(spans: Iterable[tuple[int, int, int, int]]) -> Stack:
    """Of (tensor, first point, last point, bytes), each pushed when it begins."""
    events = sorted((p, order, t, n) for t, first, last, n in spans for p, order in ((first, 1), (last + 1, 0)))
    pushed: list[list[int]] = []  # tensor, bytes, whether it is used
    high = out_of_order = holes = 0
    for _, begins, t, nbytes in events:
        if begins:
            pushed.append([t, nbytes, 1])
        else:
            out_of_order += pushed[-1][0] != t
            next(item for item in pushed if item[0] == t)[2] = 0
            while pushed and not pushed[-1][2]:
                pushed.pop()
        high = max(high, sum(n for _, n, _ in pushed))
        holes = max(holes, sum(n for _, n, used in pushed if not used))
    return Stack(high, sum(begins for _, begins, _, _ in events), out_of_order, holes)


def with_arena(graph: Graph, nbytes: int) -> Graph:
    """The graph with this many more bytes, which are in memory for the whole step."""
    last, new = len(graph.points) - 1, len(graph.tensors)
    arena = Tensor(id=new, name="arena", nbytes=nbytes, kind="buffer", storage=-1 - new, born_at=BEFORE, freed_at=last)
    return replace(graph, tensors=(*graph.tensors, arena))


def decoded_levels(graph: Graph, lives: Iterable[Life]) -> tuple[list[int], int]:
    """By point, bytes that lives that are fetched have; and how many of them there are at once."""
    nbytes, count = [0] * len(graph.points), [0] * len(graph.points)
    for life in lives:
        if life.how == "fetch":
            for p in range(life.born_at, life.freed_at + 1):
                nbytes[p] += graph.tensors[life.tensor].nbytes
                count[p] += 1
    return nbytes, max(count)


def reserved_nbytes(graph: Graph, lives: tuple[Life, ...], settings: Settings, decoded: bool = True) -> int:
    """What the caching allocator reserves. `decoded`: whether what is decoded is allocated (else it lies in a buffer)."""
    fetched = {life.tensor for life in lives if life.how == "fetch"}
    make = _Step._make

    def placed(self: _Step, tensor: int, nbytes: int) -> object:
        return make(self, tensor, nbytes if decoded or tensor not in fetched else 0)

    with mock.patch.object(_Step, "_make", placed):
        return reserved(graph, lives, settings).peak_nbytes


def rows(name: str, compress: str, graph: Graph) -> list[str]:
    """Markdown; nothing where nothing may be encoded."""
    forms = eligible(graph, compress, lossy=False)
    if not forms:
        return []
    lives = everything_away(graph, forms)
    stack = stacked(encoded(graph, lives))
    bare = tuple(replace(life, parked_nbytes=0) for life in lives)
    arena = with_arena(graph, stack.high_nbytes)
    levels, count = decoded_levels(graph, lives)
    size = max(graph.tensors[t].nbytes for t in forms)
    buffers, both = with_arena(graph, count * size), with_arena(graph, stack.high_nbytes + count * size)
    ours = simulate(graph, lives)

    def peak(of: Graph, lives: tuple[Life, ...], decoded: bool) -> int:
        line = simulate(of, lives).nbytes
        return max(line) if decoded else max(n - d for n, d in zip(line, levels, strict=True))

    cases = {
        "ours": (graph, lives, True),
        "arena": (arena, bare, True),
        "buffers": (buffers, lives, False),
        "both": (both, bare, False),
    }
    found = []
    for label, case in cases.items():
        taken = [reserved_nbytes(case[0], case[1], s, case[2]) for s in (Settings(), Settings(expandable=True))]
        found.append(
            f"| {TITLES[name]}, {compress} | {label} | {peak(*case) / MIB:.2f} | "
            f"{100 * (peak(*case) / ours.predicted.peak_nbytes - 1):+.1f} % | "
            + " | ".join(f"{n / MIB:.0f}" for n in taken)
            + " |"
        )
    print(
        f"{name}, {compress}: {stack.count} encoded, {stack.out_of_order} freed below the top, "
        f"{stack.hole_nbytes / MIB:.2f} MiB in holes at most, arena {stack.high_nbytes / MIB:.2f} MiB; "
        f"{count} buffers of {size / MIB:.2f} MiB",
        file=sys.stderr,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="digits,chargpt")
    parser.add_argument("--times", type=int, default=8, help="the demo's batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| step | | peak, MiB | | reserved | expandable |\n|---|---|---|---|---|---|")
    for name in options.models.split(","):
        settings = MODELS[name].FULL
        graph = observed(MODELS[name], replace(settings, batch_size=options.times * settings.batch_size))
        for line in [line for compress in ("lossless", "lossy", "block4") for line in rows(name, compress, graph)]:
            print(line, flush=True)


if __name__ == "__main__":
    main()
