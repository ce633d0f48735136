"""The bytes that a planned step reserves on a CUDA device: its allocations and frees, in order, go through a model of the
allocator.

Requested bytes are exactly those that `simulate` counts; reserved bytes are those that the card loses. What matters is a later
planned step, so the model goes through the history of one: first the tensors from before the step (parameters, the batch) are
allocated; then an unmodified step runs, whose update makes the optimizer's state among cached blocks; then the cache is
emptied; then planned steps run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lightning_memopt.device.kinds import CUDA
from lightning_memopt.graph import BEFORE, OUTSIDE, Graph, Op
from lightning_memopt.plan.allocator.beginning import Beginning, Wanted
from lightning_memopt.plan.allocator.model import Allocator
from lightning_memopt.plan.allocator.settings import Settings
from lightning_memopt.plan.lower import Fetch, Rebuild, Schedule, lower
from lightning_memopt.plan.model import Life
from lightning_memopt.plan.simulate import encoded, states

_TURNS = 2
"""Number of planned steps: the second one finds the blocks that the first one left in the cache."""

_WORKSPACE = "workspace"
_NO_SCHEDULE = Schedule(frozenset(), {}, {}, {})

Name = int | tuple[str, int] | str
Action = tuple[Name, int]
"""(name, bytes): allocate these bytes under the name; free the name if bytes are negative."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The most bytes in planned steps.

    peak_nbytes: bytes of segments, which are the bytes that the device loses.
    allocated_nbytes: bytes of whole blocks (`torch.cuda.memory_allocated`).
    requested_nbytes: bytes that were requested.
    """

    peak_nbytes: int
    allocated_nbytes: int
    requested_nbytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """One allocation of the user's step: consecutive versions of one storage, named after the first of them."""

    name: int
    nbytes: int
    born_at: int
    freed_at: int


def _spans(graph: Graph, until: Mapping[int, int]) -> Iterator[_Span]:
    """The allocations of a step in which each tensor stays at least until its point in `until`. An in-place op goes on in the
    same memory.
    """
    versions: dict[int, list[int]] = {}
    for t in graph.tensors:
        if not t.windows:
            versions.setdefault(t.storage, []).append(t.id)
    windows = ((t.nbytes, window) for t in graph.tensors for window in t.windows)
    for name, (nbytes, (first, last)) in enumerate(windows, len(graph.tensors)):
        yield _Span(name, nbytes, first, last)
    for ids in versions.values():
        span: _Span | None = None
        for id in sorted(ids, key=lambda i: (graph.tensors[i].born_at, i)):
            t = graph.tensors[id]
            end = max(t.freed_at, until.get(id, BEFORE))
            if span is not None and t.born_at == span.freed_at + 1 and t.nbytes == span.nbytes:
                span = _Span(span.name, span.nbytes, span.born_at, max(end, span.freed_at))
                continue
            if span is not None and span.freed_at >= max(span.born_at, 0):
                yield span
            span = _Span(id, t.nbytes, t.born_at, end)
        if span is not None and span.freed_at >= max(span.born_at, 0):
            yield span


class _Step:
    """The actions of one step, made once and repeated.

    actions: allocations and frees, in order.
    resident: allocations that are there all the time.
    before: allocations that are there when the step begins, and that it frees (old gradients).
    after: allocations that are there when the step ends (new gradients).
    ends: for each point, how many actions there are up to its end.
    tensors: name of an allocation of a rebuild or a fetch -> the tensor that it was first made for.

    is_recorded: whether a recorder sees the step even if the schedule is empty.
    """

    def __init__(
        self,
        graph: Graph,
        until: Mapping[int, int],
        schedule: Schedule,
        lives: Iterable[Life] = (),
        is_recorded: bool = True,
    ) -> None:
        self.graph, self.schedule = graph, schedule
        self.actions: list[Action] = []
        self.resident: list[_Span] = []
        self.before: list[_Span] = []
        self.after: list[_Span] = []
        self.ends: list[int] = []
        self.tensors: dict[Name, int] = {}
        self._made: dict[int, list[Name]] = {}
        self._count = 0
        last = len(graph.points) - 1
        born: dict[int, list[_Span]] = {}
        freed: dict[int, list[_Span]] = {}
        for span in sorted(_spans(graph, until), key=lambda s: s.name):
            if span.born_at == BEFORE:
                (self.resident if span.freed_at == last else self.before).append(span)
            else:
                born.setdefault(span.born_at, []).append(span)
                if span.freed_at == last:
                    self.after.append(span)
            if span.freed_at < last:
                freed.setdefault(span.freed_at, []).append(span)
        same: dict[int, int] = {}
        """Tensor -> the tensor whose memory it takes over."""
        if not schedule.segments and not is_recorded:
            for op_id, product in graph.biased.items():
                (sum_,) = graph.ops[op_id].outputs
                same[sum_] = same.get(product, product)
        over = {graph.ops[op_id].inputs[0] for op_id in graph.biased} if same else set()
        ends: dict[int, list[int]] = {}
        lives = tuple(lives)
        kept = {op.id for op in states(graph, schedule)}
        encodings: dict[int, list[Action]] = {}
        for tensor, first, end, nbytes in encoded(graph, lives):
            encodings.setdefault(first, []).append((("encoded", tensor), nbytes))
            encodings.setdefault(end + 1, []).insert(0, (("encoded", tensor), -1))
        for life in lives:
            if life.how != "original":
                ends.setdefault(life.freed_at, []).append(life.tensor)
        actions, last_release = self.actions, graph.last_release
        for p, point in enumerate(graph.points):  # at most of them, little happens
            if p in encodings:
                actions += encodings[p]
            made: list[Action] = [(span.name, span.nbytes) for span in born[p] if span.name not in same] if p in born else []
            if point.kind == "op":
                op = graph.ops[point.id]
                if op.id in kept:
                    actions.append((("state", op.id), op.state_nbytes))
                self._run(op, made)
            elif made:
                actions += made
            if p in schedule.segments:
                self._segment(p)
            if p in ends:
                actions += [(self._made[t].pop(), -1) for t in ends[p]]
            if p in freed:
                actions += [(same.get(span.name, span.name), -1) for span in freed[p] if span.name not in over]
            if p == last_release:
                actions += [(("state", op), -1) for op in kept]
            self.ends.append(len(actions))

    def _run(self, op: Op, made: list[Action]) -> None:
        """Append the requests of an op that makes the blocks `made`, in the order of the op's requests if that is known.
        Otherwise these blocks come first, and the op's workspace is one block.
        """
        asked = self.graph.asked.get(op.id)
        if asked is None:
            self.actions += made
            if op.workspace_nbytes:
                self.actions += [(_WORKSPACE, op.workspace_nbytes), (_WORKSPACE, -1)]
            return
        freed = {-n for n in asked if n < 0}
        names: dict[int, Name] = {}
        for nbytes in asked:
            if nbytes < 0:
                self.actions.append((names[-nbytes], -1))
                continue
            number = len(names) + 1
            names[number] = _WORKSPACE, number
            if number in freed:
                self.actions.append((names[number], nbytes))
                continue
            size = CUDA.allocated_nbytes(nbytes)
            result = next((action for action in made if action[1] == size), None)
            if result is not None:
                made.remove(result)
                self.actions.append(result)
        self.actions += made

    def _named(self, tensor: int) -> Name:
        """A name for the next allocation of a tensor that is rebuilt or fetched."""
        self._count += 1
        name = ("again", self._count)
        self.tensors[name] = tensor
        return name

    def _make(self, tensor: int, nbytes: int) -> Name:
        name = self._named(tensor)
        self.actions.append((name, nbytes))
        return name

    def _segment(self, p: int) -> None:
        tensors = self.graph.tensors
        for step in self.schedule.segments.get(p, ()):
            if isinstance(step, Fetch):
                self._made.setdefault(step.tensor, []).append(self._make(step.tensor, tensors[step.tensor].nbytes))
                continue
            if not isinstance(step, Rebuild):
                self.actions.append((self._made[step.tensor].pop(), -1))
                continue
            op = self.graph.ops[step.op]
            overwritten = {new: old for old, new in op.mutates}
            made: list[Action] = []
            for t in op.outputs:
                old = overwritten.get(t)
                if old is None:
                    name = self._named(t)
                    made.append((name, tensors[t].nbytes))
                elif old in step.clones:
                    name = self._make(t, tensors[old].nbytes)
                else:
                    name = self._made[old].pop()
                self._made.setdefault(t, []).append(name)
            self._run(op, made)

    def run(self, allocator: Allocator, made: Iterable[_Span] = ()) -> None:
        """Carry out one step. Then the allocations that it leaves become those that the next step begins with (`before`), if
        their sizes agree. `made`: allocations that are made when the update begins, and that stay; the gradients are still
        there then.
        """
        update = next((op.at for op in self.graph.ops if op.phase == "update"), len(self.ends))
        until = self.ends[update - 1] if update else 0
        _carry_out(self.actions[:until], allocator)
        for span in made:
            allocator.alloc(span.name, span.nbytes)
        _carry_out(self.actions[until:], allocator)
        left: dict[int, list[int]] = {}
        for span in self.after:
            left.setdefault(span.nbytes, []).append(span.name)
        missing = []
        for span in self.before:
            if left.get(span.nbytes):
                allocator.rename(left[span.nbytes].pop(0), span.name)
            else:
                missing.append(span)
        for names in left.values():
            for name in names:
                allocator.free(name)
        for span in missing:
            allocator.alloc(span.name, span.nbytes)


def _carry_out(actions: Iterable[Action], allocator: Allocator) -> None:
    for name, nbytes in actions:
        if nbytes >= 0:
            allocator.alloc(name, nbytes)
        else:
            allocator.free(name)


def _unmodified(graph: Graph) -> _Step:
    return _Step(graph, {t: graph.saved_until(t) for t in graph.saves_of}, _NO_SCHEDULE)


def _planned(graph: Graph, lives: tuple[Life, ...], schedule: Schedule) -> _Step:
    return _Step(graph, {life.tensor: life.freed_at for life in lives if life.how == "original"}, schedule, lives, False)


def requests(graph: Graph, lives: Iterable[Life] | None = None) -> list[Action]:
    """The allocations and frees of one step, in order: of the unmodified step, or of one planned by `lives`.

    Tensors that are there before and after the step are not among them. Those that are there only when the step begins (old
    gradients) come first; those that are there when it ends are not freed.
    """
    if lives is None:
        step = _unmodified(graph)
    else:
        lives = tuple(lives)
        step = _planned(graph, lives, lower(graph, lives))
    return [(span.name, span.nbytes) for span in step.before] + step.actions


@dataclass(frozen=True, slots=True)
class Described:
    """The requests of one planned step, and what each is for.

    resident: (tensor, bytes) of each tensor that is there when the step begins, and stays or is freed in the step.
    actions: the allocations and frees of the step, in order.
    points: the point of each action.
    again: name of an allocation of a rebuild or a fetch -> its tensor. Other names that are numbers are ids of tensors; numbers
        from the number of tensors on are windows of gathered weights.
    """

    resident: list[tuple[int, int]]
    actions: list[Action]
    points: list[int]
    again: dict[Name, int]


def described(graph: Graph, lives: Iterable[Life]) -> Described:
    """The requests of a step that is planned by `lives`."""
    lives = tuple(lives)
    step = _planned(graph, lives, lower(graph, lives))
    points, before = [], 0
    for p, end in enumerate(step.ends):
        points += [p] * (end - before)
        before = end
    resident = [(span.name, span.nbytes) for span in (*step.resident, *step.before)]
    return Described(resident, step.actions, points, step.tensors)


def reserved(
    graph: Graph,
    lives: Iterable[Life],
    settings: Settings | None = None,
    schedule: Schedule | None = None,
    beginning: Beginning | None = None,
) -> Reserved:
    """Carry out the history, then the planned steps of `lives`; the peaks are those of the planned steps. `beginning`: what a
    real allocator has now; it is used instead of a history. If its segments may serve in several orders, the highest peaks
    count.
    """
    lives = tuple(lives)
    planned = _planned(graph, lives, schedule or lower(graph, lives))
    peaks = []
    for order in range(1 if beginning is None else beginning.orders):
        allocator = Allocator(settings)
        if beginning is None:
            _history(graph, planned, allocator)
        else:
            _begin(graph, planned, allocator, beginning, order)
        allocator.empty_cache()
        allocator.reset_peaks()
        for _ in range(_TURNS):
            planned.run(allocator)
        peaks.append((allocator.peak_reserved, allocator.peak_allocated, allocator.peak_requested))
    return Reserved(*map(max, *peaks) if len(peaks) > 1 else peaks[0])


def _begin(graph: Graph, planned: _Step, allocator: Allocator, beginning: Beginning, order: int) -> None:
    """Enter what a real allocator has, and allocate what the step needs beside it. `order`: the number of an order of the
    segments.
    """
    own: list[Wanted] = []
    unseen: list[Wanted] = []
    for span in (*planned.resident, *planned.before):
        t = graph.tensors[span.name] if span.name < len(graph.tensors) else None
        wanted = Wanted(span.name, span.nbytes, "parameter" if t is None else t.kind)
        (unseen if t is not None and t.name == OUTSIDE else own).append(wanted)
    for wanted in beginning.enter(allocator, own, unseen, order):
        allocator.alloc(wanted.name, wanted.nbytes)


def _history(graph: Graph, planned: _Step, allocator: Allocator) -> None:
    """Carry out what comes before the planned steps, up to the observed step."""
    observed = _unmodified(graph)
    kinds = {span.name: graph.tensors[span.name].kind for span in planned.resident}
    made = [span for span in planned.resident if kinds[span.name] == "optimizer_state"]
    for span in planned.resident:
        if kinds[span.name] != "optimizer_state":
            allocator.alloc(span.name, span.nbytes)
    for span in observed.before:
        allocator.alloc(span.name, span.nbytes)
    observed.run(allocator, made)
    for span in observed.before:
        allocator.free(span.name)
    for span in planned.before:
        allocator.alloc(span.name, span.nbytes)
