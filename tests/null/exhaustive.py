"""The exact frontier of small steps: all valid sets of lives are searched.

`Search` knows nothing of cuts. What is in memory at the requests of backward, one set after the other, is a plan: between two
requests a tensor stays, or goes as early as autograd lets it. Of all ways to a set only the undominated pairs (peak bytes,
extra seconds) are kept, so what is left at the end is the exact frontier of the step (`cheapest`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from build import Step

from lightning_memopt.graph import BEFORE, Graph, Op, Point, base_levels, unmodified_levels, workspaces
from lightning_memopt.plan import Life, LoweringError, Rebuild
from lightning_memopt.plan.lower import segment

# -- steps -----------------------------------------------------------------------------------------


def random_small_step(rng: random.Random, most: int = 5) -> Graph:
    """`most` tensors made in forward or one more, held by user code, autograd or nobody; ops of equal seconds and of none."""
    step = Step()
    usable = [step.given(rng.randint(0, 4))]
    saved: set[int] = set()
    while len(step.tensors) <= most:
        inputs = rng.sample(usable[-3:], min(len(usable), rng.choice((1, 1, 2))))
        mutates = [t for t in inputs if t != 0 and t not in saved and rng.random() < 0.4][:1]
        recomputable = rng.random() < 0.9
        makes = [] if mutates else [rng.randint(1, 12) for _ in range(rng.choice((1, 1, 1, 2)))]
        outputs = step.op(
            *inputs,
            makes=makes,
            mutates=mutates,
            seconds=rng.choice((0.0, 1.0, 1.0, rng.randint(1, 16) / 8)),
            workspace=rng.choice((0, 0, 0, 3)),
            recomputable=recomputable,
            unrebuilt=int(len(makes) == 2 and rng.random() < 0.5),
            state=rng.choice((0, 0, 0, 0, 0, 1)),
        )
        usable = [t for t in usable if t not in mutates] + list(outputs)
        packs = [t for t in (*inputs, *outputs) if t not in mutates and rng.random() < 0.6]
        step.saves += [(len(step.ops) - 1, t) for t in packs]
        saved.update(packs)
        saved.update(t for t in outputs if not recomputable)  # autograd refuses what is changed; an anchor must stay
        saved.update(step.ops[-1]["unrebuilt"])
    if not step.saves:
        step.saves.append((len(step.ops) - 1, usable[-1]))
    graph = step.build(gradient=rng.randint(0, 3), twice=rng.random() < 0.15, rng=rng)
    return user_holds(graph, rng)


def user_holds(graph: Graph, rng: random.Random) -> Graph:
    """User code keeps some of what forward made for longer, and may write over it when backward is over."""
    end = len(graph.points) - 1
    tensors = list(graph.tensors)
    made = [t for op in graph.forward for t in op.outputs if t not in graph.overwritten]
    for t in made:
        if rng.random() < 0.15:
            tensors[t] = replace(tensors[t], freed_at=rng.randint(tensors[t].freed_at, end))
    if made and rng.random() < 0.15:
        return overwritten_late(replace(graph, tensors=tuple(tensors)), rng.choice(made))
    return replace(graph, tensors=tuple(tensors))


def overwritten_late(graph: Graph, old: int) -> Graph:
    """After backward, user code holds the tensor `old` of forward and writes over it."""
    at, new = len(graph.points), len(graph.tensors)
    op = Op(id=len(graph.ops), name="add_", phase="update", inputs=(old,), outputs=(new,), mutates=((old, new),), at=at)
    tensors = [replace(t, freed_at=at) if t.born_at == BEFORE else t for t in graph.tensors]
    tensors[old] = replace(tensors[old], freed_at=at - 1)
    tensors.append(replace(tensors[old], id=new, born_at=at, freed_at=at))
    return replace(graph, ops=(*graph.ops, op), tensors=tuple(tensors), points=(*graph.points, Point("op", op.id)))


def then(first: Graph, second: Graph) -> Graph:
    """A step that goes forward again after its first backward, as a gradient penalty does: nothing of that can run again."""
    at, t, o, s = len(first.points), len(first.tensors), len(first.ops), len(first.saves)
    end = at + len(second.points) - 1

    ops = [
        replace(
            op,
            id=op.id + o,
            phase="backward",
            inputs=tuple(i + t for i in op.inputs),
            outputs=tuple(i + t for i in op.outputs),
            mutates=tuple((a + t, b + t) for a, b in op.mutates),
            recomputable=False,
            unrebuilt=(),
            at=op.at + at,
        )
        for op in second.ops
    ]
    tensors = [replace(x, freed_at=end) if x.born_at == BEFORE else x for x in first.tensors]
    for x in second.tensors:
        born = BEFORE if x.born_at == BEFORE else x.born_at + at
        tensors.append(replace(x, id=x.id + t, storage=x.storage + t, born_at=born, freed_at=x.freed_at + at))
    saves = []
    for y in second.saves:
        moved = dict(unpacked_at=tuple(p + at for p in y.unpacked_at), released_at=y.released_at + at)
        saves.append(replace(y, id=y.id + s, tensor=y.tensor + t, op=y.op + o, **moved))
    points = [Point(p.kind, p.id + (o if p.kind == "op" else s), p.occurrence) for p in second.points]
    return replace(
        first,
        ops=(*first.ops, *ops),
        tensors=tuple(tensors),
        saves=(*first.saves, *saves),
        points=(*first.points, *points),
    )


# -- every plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A cheapest way to what is in memory at a request: what stays there (`kept`) and what is made there (`born`)."""

    peak: int
    seconds: float
    kept: int = 0
    born: int = 0
    before: Way | None = None


def best(ways: list[Way]) -> list[Way]:
    """The undominated ones, peaks rising."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.peak, w.seconds)):
        if not found or way.seconds < found[-1].seconds:
            found.append(way)
    return found


def subsets(mask: int) -> Iterator[int]:
    part = mask
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & mask


class Search:
    """All plans of a step that replay no random op but `random`. Sets of tensors are bits, in the order of `tensors`.

    What user code holds is taken to be held as long as it does: that costs nothing and is a start for replays.
    """

    def __init__(self, graph: Graph, random: frozenset[int]) -> None:
        self.graph = graph
        self.random = random
        wanted = {s.tensor for s in graph.saves if s.unpacked_at}
        read = {t for op in graph.forward if op.recomputable for t in op.inputs}
        self.tensors = [t for t in graph.producers if t in wanted or t in read]
        self.bit = {t: 1 << i for i, t in enumerate(self.tensors)}
        self.requests = [p for p, point in enumerate(graph.points) if point.kind == "unpack"]
        self.level = [b + w for b, w in zip(base_levels(graph), workspaces(graph), strict=True)]
        for o in random:
            for p in range(graph.ops[o].at, graph.last_release + 1):
                self.level[p] += graph.ops[o].state_nbytes
        self.lost_at = {old: op.at for op in graph.ops for old, _ in op.mutates}
        self.most = max(unmodified_levels(graph))
        """No plan needs a higher peak than to keep all."""

    def bits(self, tensors: Iterator[int]) -> int:
        return sum(self.bit[t] for t in tensors)

    def members(self, mask: int) -> list[int]:
        return [t for t in self.tensors if self.bit[t] & mask]

    def at(self, point: int, mask: int) -> int:
        """Bytes at a point when the tensors of `mask` live there."""
        tensors = self.graph.tensors
        return self.level[point] + sum(tensors[t].nbytes for t in self.members(mask) if point > tensors[t].freed_at)

    def ends(self, tensor: int, point: int) -> int:
        """The first point after which a tensor that is in memory at the request `point` may go."""
        in_use = [s.released_at for s in self.graph.saves_of.get(tensor, ()) if s.unpacked_at and s.unpacked_at[0] <= point]
        return max([point, *in_use])

    def gap(self, before: int, after: int, here: int, kept: int) -> int | None:
        """Most bytes at the points between two requests when of `here` and of what the step makes in between `kept` stays.

        None if what is in use does not stay, or what is overwritten does.
        """
        tensors = self.graph.tensors
        until = {}
        for t in self.tensors:
            forced = before < tensors[t].freed_at >= after > tensors[t].born_at
            if forced and not self.bit[t] & kept:
                return None
            if self.bit[t] & here:
                until[t] = after if self.bit[t] & kept else self.ends(t, before)
                if until[t] >= after and not self.bit[t] & kept:
                    return None
            elif self.bit[t] & kept:
                if not before < tensors[t].born_at < after:
                    return None
                until[t] = after
            if t in until and before < self.lost_at.get(t, -2) <= until[t] and tensors[t].born_at < self.lost_at[t]:
                return None
        return max(
            (
                self.at(p, self.bits(t for t, last in until.items() if tensors[t].born_at <= p <= last))
                for p in range(max(before + 1, 0), min(after, len(self.level)))
            ),
            default=0,
        )

    def request(self, point: int, kept: int, born: int) -> tuple[int, float] | None:
        """Peak and seconds of a request when `born` is made there; None if that cannot be, or is not enough."""
        graph = self.graph
        tensor = graph.saves[graph.points[point].id].tensor
        if tensor in self.bit and not self.bit[tensor] & (kept | born):
            return None
        here = self.at(point, kept | born)
        if not born:
            return here, 0.0
        if tensor not in graph.producers:
            return None  # nobody is told of that request
        held = set(self.members(kept))
        try:
            steps = segment(graph, point, self.members(born), lambda t, p: t in held or self.given(t, p))
        except LoweringError:
            return None
        now = here - sum(graph.tensors[t].nbytes for t in self.members(born))
        peak, seconds = here, 0.0
        for step in steps:
            if not isinstance(step, Rebuild):
                now -= graph.tensors[step.tensor].nbytes
                continue
            op = graph.ops[step.op]
            if op.state_nbytes and op.id not in self.random:
                return None
            seconds += op.seconds
            now += sum(graph.tensors[t].nbytes for t in op.outputs) - sum(
                graph.tensors[old].nbytes for old, _ in op.mutates if old not in step.clones
            )
            peak = max(peak, now + op.workspace_nbytes)
        return peak, seconds

    def given(self, tensor: int, point: int) -> bool:
        """Whether the tensor was there before the step, and is there at the point: it may come and go."""
        windows = self.graph.tensors[tensor].windows
        return tensor not in self.graph.producers and (not windows or any(a <= point <= b for a, b in windows))

    def ways(self) -> list[Way]:
        """The exact frontier."""
        tensors = self.graph.tensors
        front: dict[int, list[Way]] = {0: [Way(0, 0.0)]}
        last = BEFORE
        for point in self.requests:
            stays: dict[int, list[Way]] = {}
            fresh = self.bits(t for t in self.tensors if last < tensors[t].born_at < point)
            for here, ways in front.items():
                for kept in subsets(here | fresh):
                    most = self.gap(last, point, here, kept)
                    if most is not None and most <= self.most:
                        stays.setdefault(kept, []).extend(Way(max(w.peak, most), w.seconds, kept, 0, w) for w in ways)
            front = {}
            makes = self.bits(t for t in self.tensors if tensors[t].freed_at < point and t in self.graph.rebuilders)
            for kept, ways in stays.items():
                ways = best(ways)
                for born in subsets(makes & ~kept):
                    price = self.request(point, kept, born)
                    if price is not None and price[0] <= self.most:
                        front.setdefault(kept | born, []).extend(
                            Way(max(w.peak, price[0]), w.seconds + price[1], kept, born, w.before) for w in ways
                        )
            front = {here: best(ways) for here, ways in front.items()}
            last = point
        done = []
        for here, ways in front.items():
            most = self.gap(last, len(self.level), here, 0)
            if most is not None:
                done += [replace(w, peak=max(w.peak, most)) for w in ways]
        return best(done)

    def lives(self, way: Way) -> tuple[Life, ...]:
        """The lives of a way."""
        graph = self.graph
        sets: list[tuple[int, int]] = []
        step: Way | None = way
        while step is not None and len(sets) < len(self.requests):
            sets.insert(0, (step.kept, step.born))
            step = step.before
        lives, since = [], dict[int, tuple[int, str]]()
        points = [*self.requests, len(graph.points)]
        for i, (kept, born) in enumerate(sets):
            for t in self.members(kept):
                since.setdefault(t, (graph.tensors[t].born_at, "original"))
            since |= {t: (points[i], "rebuild") for t in self.members(born)}
            stays = sets[i + 1][0] if i + 1 < len(sets) else 0
            for t in self.members((kept | born) & ~stays):
                begin, how = since.pop(t)
                lives.append(Life(tensor=t, born_at=begin, freed_at=self.ends(t, points[i]), how=how))  # type: ignore[arg-type]
        return tuple(sorted(lives, key=lambda life: (life.tensor, life.born_at)))


def cheapest(graph: Graph) -> list[tuple[int, float, tuple[Life, ...]]]:
    """(peak bytes, extra seconds, lives) of the exact frontier, peaks rising."""
    states = [op.id for op in graph.forward if op.recomputable and op.state_nbytes]
    found: list[tuple[int, float, tuple[Life, ...]]] = []
    for mask in subsets((1 << len(states)) - 1):
        search = Search(graph, frozenset(o for i, o in enumerate(states) if mask >> i & 1))
        found += [(w.peak, w.seconds, search.lives(w)) for w in search.ways()]
    front: list[tuple[int, float, tuple[Life, ...]]] = []
    for plan in sorted(found, key=lambda plan: plan[:2]):
        if not front or plan[1] < front[-1][1]:
            front.append(plan)
    return front
