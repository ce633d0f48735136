"""Build the graph of a step, with consecutive ids, from what a tracer has seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_memopt.graph import BEFORE, Graph, Op, Point, Save, Tensor
from lightning_memopt.native.engine import hiding, maker
from lightning_memopt.trace.seen import SeenOp, SeenSave, SeenTensor, never_asked


def graph_of(
    seen_ops: Sequence[SeenOp],
    seen_tensors: Mapping[int, SeenTensor],
    seen_saves: Mapping[int, SeenSave],
    points: Sequence[Point],
    seconds: Sequence[float],
    device: str,
    lines: Mapping[int, str],
) -> Graph:
    """The graph. Versions that no op used are left out.

    seen_tensors, seen_saves: by ids that need not be consecutive.
    seconds: seconds of each op.
    device: type of the training device.
    lines: the line of user code of each op that may run again.
    """
    end, hidden = len(points) - 1, hiding()
    ids, saves = ({id: i for i, id in enumerate(sorted(seen))} for seen in (seen_tensors, seen_saves))
    written = {old: (new, op.at) for op in seen_ops for old, new in op.mutates}
    kept = never_asked(seen_saves.values(), end, written.keys())
    # an input from before the step is overwritten: a rebuild in backward would read other bytes
    lost = {t for t in written if t in seen_tensors and seen_tensors[t].born_at == BEFORE}
    make = maker(Op)
    ops, of = list[Op](), ids.__getitem__
    for i, op in enumerate(seen_ops):  # in one loop, and without `replace`: there are thousands
        recomputable = op.recomputable and lost.isdisjoint(op.inputs)
        mutates = tuple([(ids[a], ids[b]) for a, b in op.mutates]) if op.mutates else ()
        read_and_made = tuple(map(of, op.inputs)), tuple(map(of, op.outputs)), mutates
        took = seconds[i], op.workspace_nbytes, op.flops
        kind = op.scope, op.heavy, recomputable, op.state_nbytes, op.at, tuple(map(of, op.unrebuilt))
        ops.append(make(i, op.name, op.phase, *read_and_made, *took, *kind))

    def read(save: SeenSave) -> int:
        """The version of the saved tensor that autograd reads: the one in memory when autograd first needs the save."""
        tensor, needed_at = save.tensor, save.first_needed_at(end)
        while tensor in written and written[tensor][1] < needed_at:
            tensor = written[tensor][0]
        return ids[tensor]

    def save_of(i: int, save: SeenSave) -> Save:
        released_at = end if save.released_at is None else save.released_at
        return Save(id=i, tensor=read(save), op=save.op, unpacked_at=tuple(save.unpacked_at), released_at=released_at)

    make_tensor, tensors = maker(Tensor), list[Tensor]()
    for id, seen in sorted(seen_tensors.items()):
        freed_at = end if seen.freed_at is None else max(seen.freed_at, kept.get(id, -1))
        own = seen.name, seen.nbytes, seen.kind, ids[seen.storage], seen.born_at, freed_at, seen.dtype, seen.size
        windows = seen.windows if seen.open_at is None else seen.intervals(end)
        tensors.append(make_tensor(len(tensors), *own, windows))
    return Graph(
        ops=tuple(ops),
        tensors=tuple(tensors),
        saves=tuple([hidden(save_of(saves[i], save)) for i, save in sorted(seen_saves.items())]),
        points=tuple([p if p.kind == "op" else hidden(p._replace(id=saves[p.id])) for p in points]),
        device=device,
        step_seconds=sum([op.seconds for op in ops]),
        lines=dict(lines),
        save_lines={saves[i]: s.line for i, s in seen_saves.items()},
    )
