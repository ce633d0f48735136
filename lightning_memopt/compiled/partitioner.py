"""Where torch.compile asks how to split a region into forward and backward, and our answer.

Inductor's setting `custom_partitioner_fn` is the door, and backends.py has one for other backends. They are ours during a
forward of a watched model only. A region without a plan is split as torch does it by itself, and its joint graph is read. A
region with a plan is rewritten before the split.

What was compiled before cannot be asked: `forget` makes dynamo compile it again at its next call. AOT autograd's own cache is
off meanwhile, because it answers without asking. Inductor's cache of generated code stays on.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from types import CodeType
from typing import Any

from torch import fx

from lightning_memopt.compiled.backends import Asked, Split, Splitter, asked_here, backend_seams, backends
from lightning_memopt.compiled.halves import Halves, halves_of
from lightning_memopt.compiled.joint import Joint
from lightning_memopt.compiled.rewriting import rewrite
from lightning_memopt.compiled.sizes import Signature, UnreadableError
from lightning_memopt.plan import Life, LoweringError
from lightning_memopt.record import Listening, Seams, listening_to, told_of_compiled
from lightning_memopt.torch_private import (
    autograd_config,
    compile_again,
    compiled_codes,
    inductor_compiles,
    inductor_config,
    partitioner_class,
    split_by_cut,
    split_in_place,
    told_of_code,
    unique_nodes,
)


def compiles() -> bool:
    """Whether a region may be compiled in this process."""
    return inductor_compiles() or backends() is not None


def key_of(joint: Joint) -> str:
    """Identifies a region: forward and backward, and all sizes. It is the same when the region is compiled again."""
    digest = hashlib.sha256(f"{joint.graph.device} {joint.checkpointed}".encode())
    signature = Signature()
    for op, node in zip(joint.graph.ops, joint.ops, strict=True):
        digest.update(f"{op.phase} {op.name}{op.inputs}->{op.outputs}:{signature.of(node)}".encode())
    return digest.hexdigest()[:32]


def as_torch_does(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Split:
    """Torch's own split of a joint graph, which may run cheap ops again."""
    return split_by_cut(module, inputs, **options)


def as_written(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Split:
    """The split in which each op runs where it stands: the backward saves what it reads of the forward."""
    options.pop("compiler", None)
    return split_in_place(module, inputs, **options)


@cache
def _partitioner() -> Any:
    class Partitioner(partitioner_class()):  # type: ignore[misc]
        """Inductor copies and pickles its settings, and asks for an identity: answers follow from the graphs alone."""

        def __init__(self, default: Splitter) -> None:
            self._default = default

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Split:
            return asked_here(_inductor_seams, self._default)(gm, joint_inputs, **options)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)

        def uuid(self) -> str:
            return "lightning_memopt"

    return Partitioner


def _in_place_of(partitioner: Splitter | None) -> Any:
    """`partitioner`: the user's; None where Inductor splits."""
    return _partitioner()(partitioner or as_torch_does)


# Settings of the whole process: sessions of several threads may leave in another order than they came in.
_inductor_seams: Seams[Asked] = Seams(lambda: [(inductor_config(), "custom_partitioner_fn", _in_place_of)])
_cache_seams: Seams[Asked] = Seams(lambda: [(autograd_config(), "enable_autograd_cache", lambda _: False)])


def asked_to_split(asking: Callable[[Splitter], Splitter]) -> list[Listening]:
    """What to listen to so that `asking(partitioner)` splits the regions that this thread compiles, not `partitioner`."""
    asked: Asked = threading.get_ident(), asking
    all: list[Listening] = [(_cache_seams, asked)]
    if inductor_compiles():
        all.append((_inductor_seams, asked))
    if backends() is not None:
        all.append((backend_seams, asked))
    return all


def _set(stack: contextlib.ExitStack, config: Any, name: str, value: Any) -> None:
    """Change a setting until the stack is closed. (`config.patch` makes a class each time: garbage in a cycle.)"""
    stack.callback(setattr, config, name, getattr(config, name))
    setattr(config, name, value)


class Region:
    """A compiled region: a graph, however many pieces of code have it.

    graph: its joint graph as data, with the sizes of the batch that it was compiled for first.
    dynamic: whether its code serves batches of other sizes, too.
    checkpointed: whether its user checkpoints parts of it, as long as it has no plan.
    lives: its plan; None where it runs as torch splits it.
    unplanned: bytes without a plan, as torch splits it; None where it was never split so.
    codes: the code that was compiled to it.
    forgotten: whether its code is compiled anew when it runs next, maybe to another region.
    """

    def __init__(self, joint: Joint) -> None:
        self.graph, self.dynamic, self.checkpointed = joint.graph, joint.dynamic, joint.checkpointed
        self.lives: tuple[Life, ...] | None = None
        self.unplanned: Halves | None = None
        self.codes: set[CodeType] = set()
        self.forgotten = False


class Regions:
    """The regions of a model, as they are compiled.

    by_key: those that can be planned.
    opaque: why others cannot; each reason once.
    splits: how many joint graphs were split.
    seen: the regions that were split, until somebody takes them.
    runs: how often generated code ran in the forward that was listened to last. (Inductor's does not count in the first one.)
    """

    def __init__(self, recall: Callable[[str], tuple[Life, ...] | None] = lambda _: None) -> None:
        """`recall`: the plan of an earlier run for the region with this key, or None."""
        self._recall = recall
        self.by_key: dict[str, Region] = {}
        self.opaque: dict[str, None] = {}
        self.splits = self.runs = 0
        self.seen: list[Region] = []
        self._split: list[Region] = []
        self._own_order = contextlib.ExitStack()

    @contextlib.contextmanager
    def listening(self, more: Iterable[Listening] = ()) -> Iterator[None]:
        """Within, regions that are compiled are read, and split by their plans. `more`: what else is listened to."""
        if not compiles():
            yield
            return
        told = told_of_code(self._compiled)
        self.runs = 0
        asked = asked_to_split(lambda default: partial(self._answer, default))
        try:
            with listening_to([*asked, *told_of_compiled(self._code_runs), *more]):
                yield
        finally:
            told.remove()
            self._own_order.close()

    @contextlib.contextmanager
    def _code_runs(self) -> Iterator[None]:
        self.runs += 1
        yield

    def forget_all(self) -> None:
        """All code that was compiled before is compiled again when it runs next: nobody asked how to split it."""
        if compiles():
            for code in compiled_codes():
                compile_again(code)

    def forget(self, regions: Iterable[Region]) -> None:
        """The code of these regions is compiled again when it runs next."""
        codes = {code for region in regions for code in region.codes}
        for code in codes:
            compile_again(code)
        for region in self.by_key.values():  # code that serves several sizes may have become several regions
            if region.codes & codes:
                region.codes -= codes
                region.forgotten = not region.codes

    def _answer(self, default: Splitter, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Split:
        self.splits += 1
        unique_nodes(module)
        copied = fx.GraphModule(module, copy.deepcopy(module.graph))
        try:
            region = self._region_of(Joint(copied))
        except Exception as error:  # whatever a joint graph has: the user's code is compiled as without us
            self._cannot_plan(error)
            return default(module, inputs, **options)
        region.forgotten = False
        self._split.append(region)
        self.seen.append(region)
        if region.lives is None:
            region.unplanned = halves_of(*(halves := default(module, inputs, **options)))
            return halves
        # Inductor's own order would undo the plan's: it lowered no peak where it was tried, and raised some
        _set(self._own_order, inductor_config(), "reorder_for_peak_memory", False)
        try:
            return as_written(copied, inputs, **options)
        except Exception as error:
            self._cannot_plan(error)
            region.forgotten = True  # it is no stage of a step any more
            self._own_order.close()
            return default(module, inputs, **options)

    def _cannot_plan(self, error: Exception) -> None:
        self.opaque[str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"] = None

    def _region_of(self, joint: Joint) -> Region:
        """The region with this graph; its plan, if it has one, is written into the graph."""
        key = key_of(joint)
        region = self.by_key.get(key)
        if region is None:
            region = self.by_key[key] = Region(joint)
            recalled = self._recall(key)
            with contextlib.suppress(LoweringError):  # a file that is no plan of this graph
                if recalled is not None:
                    rewrite(joint, recalled)
                    region.lives = recalled
        elif region.lives is not None:
            rewrite(joint, region.lives)
        return region

    def _compiled(self, code: CodeType, _: CodeType) -> None:
        """Dynamo has compiled this code: the regions that were split meanwhile belong to it."""
        for region in self._split:
            region.codes.add(code)
        self._split.clear()
        self._own_order.close()
