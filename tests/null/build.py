"""Steps made by hand: forward ops one after the other, then a backward pass that asks for what they saved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_memopt.graph import BEFORE, Graph, Op, Point, Save, Tensor


@dataclass
class Step:
    """Forward ops are added in order; `build` lets each node's backward run in reverse and gives the graph.

    A tensor that an op made is in the user's hands until the last forward op that reads it.
    """

    device: str = "cpu"
    tensors: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    """(op, tensor), in order of packing."""

    def given(self, nbytes: int = 8, kind: str = "parameter") -> int:
        """A tensor that exists when the step begins, and when it ends."""
        return self._tensor(nbytes, kind, None, f"{kind} {len(self.tensors)}")

    def op(
        self,
        *inputs: int,
        makes: Sequence[int] = (8,),
        saves: Sequence[int | str] = (),
        mutates: Sequence[int] = (),
        name: str = "op",
        seconds: float = 1.0,
        workspace: int = 0,
        recomputable: bool = True,
        unrebuilt: int = 0,
        state: int = 0,
        scope: str = "",
        flops: int = 0,
    ) -> tuple[int, ...]:
        """Add a forward op; `makes` are sizes of new storages, of which a second run does not make the last `unrebuilt`.
        `mutates` are inputs of which it makes a new version.

        Its outputs, the new versions last. `saves` are tensors that its node packs; `"out"` is its first output.
        """
        index = len(self.ops)
        outputs = [self._tensor(nbytes, "activation", None, f"{name} {index}") for nbytes in makes]
        pairs = []
        for old in mutates:
            before = self.tensors[old]
            new = self._tensor(before["nbytes"], before["kind"], before["storage"], f"{name} {index}")
            pairs.append((old, new))
            outputs.append(new)
        self.ops.append(
            dict(
                name=name,
                inputs=(*inputs, *(t for t in mutates if t not in inputs)),
                outputs=tuple(outputs),
                mutates=tuple(pairs),
                seconds=seconds,
                workspace_nbytes=workspace,
                recomputable=recomputable,
                unrebuilt=tuple(outputs[len(makes) - unrebuilt : len(makes)]),
                state_nbytes=state,
                scope=scope,
                flops=flops,
            )
        )
        self.saves += [(index, outputs[0] if t == "out" else int(t)) for t in saves]
        return tuple(outputs)

    def _tensor(self, nbytes: int, kind: str, storage: int | None, name: str) -> int:
        id = len(self.tensors)
        self.tensors.append(dict(name=name, nbytes=nbytes, kind=kind, storage=id if storage is None else storage))
        return id

    def build(self, *, gradient: int = 4, twice: bool = False, rng: random.Random | None = None) -> Graph:
        """The graph. `gradient`: bytes between backward ops; `twice`: every save is asked for a second time at the end;
        `rng`: requests come somewhat out of order, releases late."""
        points = [Point("op", i) for i in range(len(self.ops))]
        ops = [Op(id=i, phase="forward", at=i, **op) for i, op in enumerate(self.ops)]
        born: dict[int, int] = {}
        freed: dict[int, int] = {}
        for op in ops:
            born |= dict.fromkeys(op.outputs, op.at)
            freed |= dict.fromkeys((*op.outputs, *op.inputs), op.at)
            freed |= {old: op.at - 1 for old, _ in op.mutates}
        unpacked: dict[int, list[int]] = {}
        released: dict[int, int] = {}
        nodes = sorted({op for op, _ in self.saves}, reverse=True)
        late: list[int] = []
        before: int | None = None
        for node in nodes * (2 if twice else 1):
            again = twice and len(unpacked) == len(self.saves)
            asked = [s for s, (op, _) in enumerate(self.saves) if op == node]
            if rng is not None:
                rng.shuffle(asked)
            for s in asked:
                unpacked.setdefault(s, []).append(len(points))
                points.append(Point("unpack", s, len(unpacked[s]) - 1))
            made = len(self.tensors)
            self._tensor(gradient, "gradient", None, f"gradient {node}")
            inputs = (*(() if before is None else (before,)), *(self.saves[s][1] for s in asked))
            born[made] = freed[made] = len(points)
            if before is not None:
                freed[before] = len(points)
            ops.append(Op(id=len(ops), name="backward", phase="backward", inputs=inputs, outputs=(made,), at=len(points)))
            points.append(Point("op", len(ops) - 1))
            before = made
            if not twice or again or node is nodes[-1]:
                late += asked if not twice or again else []
            while late and (rng is None or rng.random() < 0.7):
                released[late[0]] = len(points)
                points.append(Point("release", late.pop(0)))
        end = len(points) - 1
        tensors = tuple(
            Tensor(id=i, born_at=born.get(i, BEFORE), freed_at=freed[i] if i in born or self._gone(i) else end, **t)
            for i, t in enumerate(self.tensors)
        )
        saves = tuple(
            Save(id=s, tensor=t, op=op, unpacked_at=tuple(unpacked[s]), released_at=released.get(s, end))
            for s, (op, t) in enumerate(self.saves)
        )
        return Graph(ops=tuple(ops), tensors=tensors, saves=saves, points=tuple(points), device=self.device, step_seconds=9.0)

    def _gone(self, tensor: int) -> bool:
        return any(old == tensor for op in self.ops for old, _ in op["mutates"])


def random_step(rng: random.Random, n_ops: int = 12, *, mutation: bool = True, all_recomputable: bool = False) -> Graph:
    """A random step of up to `n_ops` forward ops: several outputs, in-place ops, random ops, saves of all kinds."""
    step = Step()
    usable = [step.given(rng.randint(1, 9)) for _ in range(2)]
    fixed = set(usable)
    saved: set[int] = set()
    for _ in range(rng.randint(2, n_ops)):
        inputs = rng.sample(usable, min(len(usable), rng.randint(1, 3)))
        # autograd refuses a tensor that was changed after it was saved; what was there before the step stays as it is
        changeable = [t for t in inputs if t not in fixed and t not in saved]
        mutates = changeable[:1] if mutation and changeable and rng.random() < 0.3 else []
        sizes = [rng.randint(1, 64) for _ in range(rng.choice((0, 1) if mutates else (1, 1, 1, 2)))]
        recomputable = all_recomputable or rng.random() < 0.93
        unrebuilt = int(len(sizes) == 2 and not all_recomputable and rng.random() < 0.5)
        outputs = step.op(
            *inputs,
            makes=sizes,
            mutates=mutates,
            seconds=rng.randint(0, 20) / 8,
            workspace=rng.choice((0, 0, 5, 30)),
            recomputable=recomputable,
            unrebuilt=unrebuilt,
            state=rng.choice((0, 0, 0, 7)),
            flops=rng.randint(0, 3),
        )
        usable = [t for t in usable if t not in mutates] + list(outputs)
        packs = [t for t in (*inputs, *outputs) if t not in mutates and rng.random() < 0.4]
        step.saves += [(len(step.ops) - 1, t) for t in packs]
        saved.update(packs)
        saved.update(t for t in outputs if not recomputable)  # an anchor must be there to be held
        saved.update(step.ops[-1]["unrebuilt"])
    if not step.saves:
        step.saves.append((len(step.ops) - 1, usable[-1]))
    return step.build(gradient=rng.randint(0, 40), rng=rng)
