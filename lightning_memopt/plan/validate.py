"""Check a schedule: carry it out step by step with a list of the tensors in memory, and look up every read in that list.

This is a second opinion on `lower` and `simulate`. It shares only the data classes with them, so that an error in either shows
up as a difference. In: a graph, the lives of a plan, and the schedule made from them. Out: the problems, in words, and the peak
as counted here.

1. A tensor may be read where an *instance* of it is live: made by the user's forward and held, or made by a Rebuild. A tensor
   that existed before the step may be read until the step frees or overwrites it; if it has windows, only within them. A tensor
   that only user code holds may not be read.
2. A Rebuild reads its inputs and makes its outputs. Nothing may read those that the op does not make again. It overwrites a
   copy (`clones`) or the instance itself, which is then gone.
3. Autograd reads one instance from the unpack to the release; nothing may free or overwrite it in between.
4. After a segment, and after the frees of a point, exactly the tensors whose lives cover the point are in memory, once each.
5. A fetched tensor was parked before, in the same form for all its lives, from an instance that the plan held and that nothing
   overwrote. If its codec is not exact, only autograd may read it.
6. Only parameters that may be updated early are, each once, in the order of the points. The gradients of all others stay to the
   end, where one update of them all takes bytes of its own.
7. Two requests that are in memory at the same time do not have overlapping addresses, not even across two steps
   (`wrong_addresses`).
8. What is parked in a tier, all of it counted at the same time, takes no more there than the plan may (`beyond_limits`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import BEFORE, Graph, Op, Save
from lightning_memopt.plan.clocks import leaves_at
from lightning_memopt.plan.forms import EXACT, codec_of, is_form, tier_of
from lightning_memopt.plan.lower import Fetch, Rebuild, Schedule
from lightning_memopt.plan.model import Addresses, Life, Plan

_MOST_PROBLEMS = 100
_PIECE = 4096
"""A tier gives a tensor so many bytes, or a multiple of that."""
_ALIGNED = 64
"""Addresses are multiples of this. With another alignment, kernels may take another path and give other bits
(runtime/pool/steps.py).
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `validate`.

    problems: one sentence for each thing that is wrong; empty if the schedule is right.
    peak_nbytes, rebuilt_ops: as in `Prediction`.
    """

    problems: tuple[str, ...]
    peak_nbytes: int
    rebuilt_ops: int

    @property
    def ok(self) -> bool:
        return not self.problems


def validate(graph: Graph, lives: Iterable[Life], schedule: Schedule, updates: tuple[int, ...] | None = None) -> Report:
    """Carry out `schedule` on `graph` and compare what is in memory with `lives`. `updates`: the parameters that are updated
    early; None stands for all that may be. Never raises for a wrong plan.
    """
    ordered = tuple(lives)
    if updates is None:
        updates = tuple(update.parameter for update in graph.updates)
    malformed = [*_malformed(graph, ordered, schedule), *_misordered(graph, updates)]
    if malformed:  # ids that do not exist: the schedule cannot be carried out
        return Report(tuple(malformed[:_MOST_PROBLEMS]), 0, 0)
    return _Ledger(graph, ordered, schedule, frozenset(updates)).carry_out()


def _malformed(graph: Graph, lives: tuple[Life, ...], schedule: Schedule) -> Iterator[str]:
    """Ids out of range, and intervals that are empty or overlap."""
    n, tensors, ops = len(graph.points), range(len(graph.tensors)), range(len(graph.ops))
    unrebuilt = {t for op in graph.ops for t in op.unrebuilt}
    before: dict[int, Life] = {}
    for i, life in enumerate(lives):
        if life.tensor not in tensors or not BEFORE <= life.born_at <= life.freed_at < n:
            yield f"life {i}: tensor {life.tensor} at points {life.born_at}..{life.freed_at} does not belong to this graph"
            continue
        last = before.get(life.tensor)
        if last is not None and life.born_at <= last.freed_at:
            yield (
                f"life {i} of tensor {life.tensor} begins at point {life.born_at}, "
                f"but the one before it ends at {last.freed_at}: lives of a tensor are disjoint and sorted"
            )
        if life.how == "rebuild" and life.tensor in unrebuilt:
            yield f"life {i}: tensor {life.tensor} is rebuilt, but no op makes it again"
        if life.how == "fetch" and (last is None or last.how == "rebuild" or not is_form(life.form) or life.parked_nbytes < 0):
            yield f"life {i}: tensor {life.tensor} is fetched, but no life before it was parked in a form {life.form!r}"
        if (life.how == "fetch") != bool(life.form) or (life.how == "fetch" and schedule.parked.get(life.tensor) != life.form):
            yield f"life {i} of tensor {life.tensor} has the form {life.form!r}; the schedule and its other lives do not agree"
        before[life.tensor] = life
    for p, steps in schedule.segments.items():
        if p not in range(n):
            yield f"the segment at point {p} is not on the axis of {n} points"
        for step in steps:
            ids = step.clones if isinstance(step, Rebuild) else (step.tensor,)
            if any(t not in tensors for t in ids) or (isinstance(step, Rebuild) and step.op not in ops):
                yield f"the segment at point {p} has {step}, which does not belong to this graph"
    for t in schedule.holds.union(*schedule.frees.values()):
        if t not in tensors:
            yield f"the schedule holds or frees tensor {t}, which does not belong to this graph"


def _misordered(graph: Graph, updates: tuple[int, ...]) -> Iterator[str]:
    """Parameters that may not be updated early, or are updated twice, or not in the order of the points."""
    allowed = [update.parameter for update in graph.updates]
    reached = -1
    for parameter in updates:
        if parameter not in allowed:
            yield f"tensor {parameter} is updated early, which the step does not allow"
        elif allowed.index(parameter) <= reached:
            yield f"parameter {parameter} ({graph.tensors[parameter].name}) is updated twice, or too late"
        else:
            reached = allowed.index(parameter)


@dataclass(slots=True)
class _Instance:
    """A copy of a tensor.

    user: whether the user's forward made its memory.
    read_until: the point of autograd's last release.
    exact: whether it has the same bits as the original.
    """

    user: bool
    read_until: int = BEFORE
    exact: bool = True


class _Ledger:
    """The tensors in memory while the points pass, in bytes and by instance."""

    def __init__(self, graph: Graph, lives: tuple[Life, ...], schedule: Schedule, early: frozenset[int]) -> None:
        self.graph = graph
        self.schedule = schedule
        self.usual = [update for update in graph.updates if update.parameter not in early]
        self.left_out = {t for update in self.usual for t in graph.temporaries_of(update.at)}
        self.later = {op.id for update in self.usual for op in graph.ops_of(update.at)}
        self.problems: list[str] = []
        self.now = self.peak = self.rebuilt_ops = 0
        self.live: dict[int, list[_Instance]] = {}
        """Instances that the plan holds, the newest last."""
        self.natural: set[int] = set()
        """Tensors that are in memory whatever the plan says."""
        self.given: set[int] = set()
        """The part of `natural` that existed before the step and that rebuilds may read."""
        self.expected: set[int] = set()
        """The tensors whose lives cover the present point."""
        self.touched: set[int] = set()
        self.begins: dict[int, list[Life]] = {}
        self.ends: dict[int, list[Life]] = {}
        for life in lives:
            self.begins.setdefault(life.born_at, []).append(life)
            self.ends.setdefault(life.freed_at, []).append(life)
        self.staged: dict[int, int] = {}
        """Point -> encoded bytes that arrive on the device at this point, less those that left after the previous point."""
        self.stage(lives)
        self.tape_ends = max((s.released_at for s in graph.saves), default=BEFORE)
        """Generator states are kept until autograd has let go of everything."""
        self.holds_states = kind_of(graph.device).is_host
        self.last_run: dict[int, int] = {}
        for p in sorted(schedule.segments):
            self.last_run.update({step.op: p for step in schedule.segments[p] if isinstance(step, Rebuild)})

    def problem(self, text: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)

    def nbytes(self, tensor: int) -> int:
        return 0 if tensor in self.left_out else self.graph.tensors[tensor].nbytes

    def called(self, tensor: int) -> str:
        return f"tensor {tensor} ({self.graph.tensors[tensor].name})"

    def stage(self, lives: tuple[Life, ...]) -> None:
        """Count encoded bytes on the device: as long as a tensor is parked there, or while it is on the way to a tier and
        back.
        """
        for i, life in enumerate(lives):
            if life.how != "fetch" or not codec_of(life.form):
                continue
            t = life.tensor
            last_of = max(x.born_at for x in lives if x.tensor == t and x.how == "fetch")
            requests = [p for s in self.graph.saves if s.tensor == t for p in s.unpacked_at[:1] if p >= life.born_at]
            read = min(requests, default=life.born_at)
            out = leaves_at(self.graph, t)
            spans = [(out, read)] if life.born_at == last_of else []
            if tier_of(life.form):
                spans = [(life.born_at, read)]
                if lives[i - 1].how == "original":
                    spans.append((out, lives[i - 1].freed_at))
            for first, last in spans:
                self.staged[first] = self.staged.get(first, 0) + life.parked_nbytes
                self.staged[last + 1] = self.staged.get(last + 1, 0) - life.parked_nbytes

    # -- the walk ----------------------------------------------------------------------------------

    def carry_out(self) -> Report:
        graph = self.graph
        if self.last_run != self.schedule.rebuilt:
            self.problem("`rebuilt` does not list the ops that the segments run, with the last point of each")
        born: dict[int, list[int]] = {}
        freed: dict[int, list[int]] = {}
        for t in graph.tensors:
            for first, last in t.windows or ((t.born_at, t.freed_at),):
                born.setdefault(first, []).append(t.id)
                if last >= max(first, 0):
                    freed.setdefault(last, []).append(t.id)
        self.exist(born.get(BEFORE, ()), BEFORE)
        at_end = min(graph.usual_nbytes, sum(update.beside_nbytes for update in self.usual))
        self.now += sum(update.nbytes for update in self.usual if update.until > BEFORE)
        for p, point in enumerate(graph.points):
            self.now += self.staged.get(p, 0) + sum(u.nbytes for u in self.usual if u.since == p)
            self.now += at_end if p == len(graph.points) - 1 else 0
            if point.kind == "op":
                self.user_op(graph.ops[point.id], p)
            self.exist(born.get(p, ()), p)
            if point.kind == "op" and point.id not in self.later:
                self.meet(graph.ops[point.id].workspace_nbytes)
            self.expect(p)
            if p in self.schedule.segments:
                self.segment(p, point.kind)
            self.compare(p, "at")
            self.meet()
            if point.kind == "unpack":
                self.unpack(graph.saves[point.id], p)
            self.leave(freed.get(p, ()), p)
            self.now -= sum(update.nbytes for update in self.usual if update.until == p)
        return Report(tuple(self.problems), self.peak, self.rebuilt_ops)

    def meet(self, extra_nbytes: int = 0) -> None:
        self.peak = max(self.peak, self.now + extra_nbytes)

    def exist(self, tensors: Iterable[int], p: int) -> None:
        """Tensors appear that no rebuild made: the step begins, or one of its own ops made them."""
        for t in tensors:
            if self.graph.tensors[t].freed_at >= max(p, 0):
                self.natural.add(t)
                self.now += self.nbytes(t)
                if p == BEFORE or self.graph.tensors[t].windows:
                    self.given.add(t)
            if t in self.schedule.holds:
                self.add(t, _Instance(user=True))
        if p == BEFORE:
            self.expect(p)

    def user_op(self, op: Op, p: int) -> None:
        """An op of the step runs: it may overwrite tensors, and its generator state is kept for rebuilds."""
        for old, _ in op.mutates:
            self.given.discard(old)
            if self.live.get(old):
                self.problem(f"{self.called(old)} is held at point {p}, where op {op.id} ({op.name}) overwrites it")
        if op.id in self.last_run and self.holds_states:
            self.now += op.state_nbytes

    def expect(self, p: int) -> None:
        for life in self.begins.get(p, ()):
            self.expected.add(life.tensor)
            self.touched.add(life.tensor)
            if life.how == "original" and (life.born_at, True) != (
                self.graph.tensors[life.tensor].born_at,
                life.tensor in self.schedule.holds,
            ):
                self.problem(f"the original life of {self.called(life.tensor)} begins at {p}, where it is not made")

    def leave(self, freed: Iterable[int], p: int) -> None:
        """Free what ends at point p: what the schedule frees, what user code frees, and what is freed with the tape."""
        for t in self.schedule.frees.get(p, ()):
            self.free(t, p, "after")
        for life in self.ends.get(p, ()):
            self.expected.discard(life.tensor)
            self.touched.add(life.tensor)
        self.compare(p, "after")
        for t in freed:
            self.natural.discard(t)
            self.given.discard(t)
            if not any(instance.user for instance in self.live.get(t, ())):  # else the plan owns it from here on
                self.now -= self.nbytes(t)
        if p == self.tape_ends and self.holds_states:
            self.now -= sum(self.graph.ops[op].state_nbytes for op in self.last_run)

    # -- one segment -------------------------------------------------------------------------------

    def segment(self, p: int, kind: str) -> None:
        if kind != "unpack":
            self.problem(f"a segment runs at point {p}, but autograd asks for nothing there")
        for step in self.schedule.segments[p]:
            if isinstance(step, Rebuild):
                self.run(self.graph.ops[step.op], step.clones, p)
            elif isinstance(step, Fetch):
                self.add(step.tensor, _Instance(user=False, exact=codec_of(self.schedule.parked[step.tensor]) in EXACT))
            else:
                self.free(step.tensor, p, "in the segment at")

    def run(self, op: Op, clones: tuple[int, ...], p: int) -> None:
        self.rebuilt_ops += 1
        name = f"the run of op {op.id} ({op.name}) at point {p}"
        if not op.recomputable or op.phase != "forward" or op.at > p:
            self.problem(f"{name}: this op cannot run again there")
        for t in dict.fromkeys(op.inputs):
            if not any(instance.exact for instance in self.live.get(t, ())) and t not in self.given:
                self.problem(f"{name} reads {self.called(t)}, which is not in memory")
        if set(clones) - {old for old, _ in op.mutates}:
            self.problem(f"{name} copies what it does not overwrite")
        consumed = [old for old, _ in op.mutates if old not in clones]
        for t in op.outputs:
            self.add(t, _Instance(user=False, exact=t not in op.unrebuilt))
        for old in consumed:  # the output uses the same bytes
            if not self.live.get(old):
                self.problem(f"{name} overwrites {self.called(old)}, which the plan does not own")
                continue
            instance = self.live[old][-1]
            if instance.user and old in self.natural:
                self.problem(f"{name} overwrites {self.called(old)}, which user code still holds")
            self.free(old, p, f"by {name},")
        self.meet(op.workspace_nbytes)

    def unpack(self, save: Save, p: int) -> None:
        t, until = save.tensor, save.released_at
        who = f"autograd reads {self.called(t)} at points {p}..{until} (save {save.id})"
        if self.live.get(t):
            instance = self.live[t][-1]
            instance.read_until = max(instance.read_until, until)
        elif t not in self.given:
            self.problem(f"{who}: it is not in memory")
        elif self.graph.tensors[t].freed_at < until:
            self.problem(f"{who}: it is freed after point {self.graph.tensors[t].freed_at}")

    # -- instances ---------------------------------------------------------------------------------

    def add(self, tensor: int, instance: _Instance) -> None:
        self.live.setdefault(tensor, []).append(instance)
        self.touched.add(tensor)
        if not (instance.user and tensor in self.natural):
            self.now += self.nbytes(tensor)

    def free(self, tensor: int, p: int, when: str) -> None:
        self.touched.add(tensor)
        if not self.live.get(tensor):
            self.problem(f"{self.called(tensor)} is freed {when} point {p}, but is not held")
            return
        instance = self.live[tensor].pop()
        if not (instance.user and tensor in self.natural):
            self.now -= self.nbytes(tensor)
        if instance.read_until > p or (instance.read_until == p and when != "after"):
            until = instance.read_until
            self.problem(f"{self.called(tensor)} is freed {when} point {p}, but autograd reads it until {until}")

    def compare(self, p: int, when: str) -> None:
        """Check all tensors that changed since the last time: are they in memory exactly as often as their lives say?"""
        for t in sorted(self.touched):
            count, wanted = len(self.live.get(t, ())), int(t in self.expected)
            if count != wanted:
                self.problem(f"{when} point {p}, {self.called(t)} is in memory {count} times; its lives say {wanted}")
        self.touched.clear()


def wrong_addresses(addresses: Addresses) -> list[str]:
    """One sentence for each thing that is wrong with the addresses. Two consecutive steps are carried out, request by
    request.
    """
    period = len(addresses.nbytes)
    if not len(addresses.offsets) == len(addresses.until) == period:
        return [f"{period} requests have {len(addresses.offsets)} offsets and {len(addresses.until)} ends"]
    problems: list[str] = []
    taken: list[tuple[int, int, int]] = []  # (first byte, last byte + 1, request) in the arena now, sorted
    ending: dict[int, list[tuple[int, int, int]]] = {}
    for now in range(2 * period):
        for ended in ending.pop(now, ()):
            taken.remove(ended)
        request = now % period
        offset, nbytes, until = addresses.offsets[request], addresses.nbytes[request], addresses.until[request]
        if offset is None or not nbytes:
            continue
        if not request < until <= request + period:
            problems.append(f"request {request} ends before request {until}, which is not within the step after it")
            break
        if offset < 0 or offset % _ALIGNED or offset + nbytes > addresses.arena_nbytes:
            problems.append(f"request {request} has {nbytes} bytes at {offset} of an arena of {addresses.arena_nbytes}")
        mine = offset, offset + nbytes, request
        at = bisect_left(taken, mine)
        near = (*taken[max(0, at - 1) : at], *taken[at : at + 1])
        problems += [
            f"requests {other[2]} and {request} overlap" for other in near if other[0] < mine[1] and mine[0] < other[1]
        ]
        if len(problems) >= _MOST_PROBLEMS:
            break
        taken.insert(at, mine)
        ending.setdefault(now - request + until, []).append(mine)
    return list(dict.fromkeys(problems))


def beyond_limits(plan: Plan) -> list[str]:
    """One sentence for each tier in which the plan parks more than it may. Counts on its own what `Plan.in_tiers` says."""
    parked = {life.tensor: (tier_of(life.form), life.parked_nbytes) for life in plan.lives if life.how == "fetch"}
    rests = [*((state.tier, state.tier_nbytes) for state in plan.states), *((w.tier, w.tier_nbytes) for w in plan.weights)]
    problems = []
    for tier, limit in plan.tier_limits:
        pieces = sum(-(-nbytes // _PIECE) for at, nbytes in parked.values() if at == tier)
        nbytes = pieces * _PIECE + sum(n for at, n in rests if at == tier)
        if nbytes > limit:
            problems.append(f"{nbytes} bytes are parked in the {tier} tier, and {limit} is the limit")
    return problems
