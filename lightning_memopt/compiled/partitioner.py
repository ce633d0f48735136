"""How torch.compile splits a region into forward and backward, and how this package changes that.

Inductor has the setting `custom_partitioner_fn` for this; backends.py does the same for other backends. Both are changed only
while something is compiled in a forward of a watched model. A region without a plan is split as torch would split it, and its
joint graph is read. A region with a plan is rewritten before the split.

Code that was compiled before is not split again. So `forget` makes dynamo compile it again at its next call. AOT autograd's
cache is off meanwhile, because it would return code without calling the partitioner. Inductor's cache of generated code stays
on.
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

from lightning_memopt.compiled.backends import PLANNED, Asked, Compiling, Split, Splitter, asked_here, backends, entry_seams
from lightning_memopt.compiled.halves import Halves, halves_of
from lightning_memopt.compiled.joint import Joint
from lightning_memopt.compiled.kernels import Ordering, asked_to_order
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
    """Identifies a region by its forward, its backward and all sizes. It stays the same when the region is compiled again."""
    digest = hashlib.sha256(f"{joint.graph.device} {joint.checkpointed}".encode())
    signature = Signature()
    for op, node in zip(joint.graph.ops, joint.ops, strict=True):
        digest.update(f"{op.phase} {op.name}{op.inputs}->{op.outputs}:{signature.of(node)}".encode())
    return digest.hexdigest()[:32]


def as_torch_does(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Split:
    """Split a joint graph as torch does, which may run cheap ops again."""
    return split_by_cut(module, inputs, **options)


def as_written(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Split:
    """Split a joint graph so that each op runs exactly where it stands: what the backward reads of the forward is saved."""
    options.pop("compiler", None)
    return split_in_place(module, inputs, **options)


@cache
def _partitioner() -> Any:
    class Partitioner(partitioner_class()):  # type: ignore[misc]
        """A class that Inductor can copy and pickle as a setting. It has a constant identity, because its answers depend only
        on the graphs.
        """

        def __init__(self, default: Splitter) -> None:
            self._default = default

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Split:
            return asked_here(tuple(_inductor_seams.listeners), self._default)(gm, joint_inputs, **options)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)

        def uuid(self) -> str:
            return "lightning_memopt"

    return Partitioner


def _in_place_of(partitioner: Splitter | None) -> Any:
    """`partitioner`: the user's own; None if Inductor uses its default."""
    return _partitioner()(partitioner or as_torch_does)


# These settings apply to the whole process, and sessions in several threads may end in another order than they began.
_inductor_seams: Seams[Asked] = Seams(lambda: [(inductor_config(), "custom_partitioner_fn", _in_place_of)])
_cache_seams: Seams[Asked] = Seams(lambda: [(autograd_config(), "enable_autograd_cache", lambda _: False)])


def asked_to_split(asking: Callable[[Splitter], Splitter], ordering: Ordering | None = None) -> Listening:
    """While this listens, `asking(partitioner)` splits the regions that this thread compiles, instead of `partitioner`, and
    Inductor calls `ordering` for the order of their kernels.
    """
    asked: Asked = threading.get_ident(), asking

    def order() -> list[Listening]:
        return [] if ordering is None else asked_to_order(ordering)

    def meanwhile(by_inductor: bool) -> list[Listening]:
        return [(_cache_seams, asked), (_inductor_seams, asked), *order()] if by_inductor else [(_cache_seams, asked)]

    return entry_seams, Compiling(asked, meanwhile, order)


def _set(stack: contextlib.ExitStack, config: Any, name: str, value: Any) -> None:
    """Change a setting until the stack is closed. (`config.patch` would create a class each time, which only the garbage
    collector frees.)
    """
    stack.callback(setattr, config, name, getattr(config, name))
    setattr(config, name, value)


class Region:
    """A compiled region: one graph, even if several pieces of compiled code have the same graph.

    graph: its joint graph as data, with the sizes of the batch that it was compiled for first.
    dynamic: whether its code also serves batches of other sizes.
    checkpointed: whether the user's checkpointing applies to parts of it, which it does as long as the region has no plan.
    logits_nbytes: see `Joint`.
    lives: its plan; None if it runs as torch splits it.
    unplanned: its bytes without a plan, as torch splits it; None if it was never split that way.
    codes: the code objects that were compiled to this region.
    forgotten: whether its code is compiled again at the next call, possibly to another region.
    """

    def __init__(self, joint: Joint) -> None:
        self.graph, self.dynamic, self.checkpointed = joint.graph, joint.dynamic, joint.checkpointed
        self.logits_nbytes = joint.logits_nbytes
        self.lives: tuple[Life, ...] | None = None
        self.unplanned: Halves | None = None
        self.codes: set[CodeType] = set()
        self.forgotten = False


class Regions:
    """The regions of a model, collected while they are compiled.

    by_key: the regions that can be planned.
    opaque: the reasons why others cannot be, each once.
    splits: how many joint graphs were split.
    seen: the regions that were split and not yet taken from here.
    runs: how often generated code ran in the last forward that was listened to. (The first run of Inductor's code is not
        counted.)
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
        self._told_of_code: Any = None  # the handle of `told_of_code`, from the first split of a forward on

    @contextlib.contextmanager
    def listening(self, ordering: Ordering | None = None) -> Iterator[None]:
        """Within this context, every region that is compiled is read, and split by its plan. `ordering`: gives the order of its
        kernels.
        """
        self.runs = 0
        asked = asked_to_split(lambda default: partial(self._answer, default), ordering)
        try:
            with listening_to([asked, *told_of_compiled(self._code_runs)]):
                yield
        finally:
            told, self._told_of_code = self._told_of_code, None
            if told is not None:
                told.remove()
                self._own_order.close()

    @contextlib.contextmanager
    def _code_runs(self) -> Iterator[None]:
        self.runs += 1
        yield

    def forget_all(self) -> None:
        """Make all code that was compiled before compile again when it runs next, because it was split without this package."""
        if compiles():
            for code in compiled_codes():
                compile_again(code)

    def forget(self, regions: Iterable[Region]) -> None:
        """Make the code of these regions compile again when it runs next."""
        codes = {code for region in regions for code in region.codes}
        for code in codes:
            compile_again(code)
        for region in self.by_key.values():  # code that serves several sizes may belong to several regions
            if region.codes & codes:
                region.codes -= codes
                region.forgotten = not region.codes

    def _answer(self, default: Splitter, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Split:
        self.splits += 1
        if self._told_of_code is None:
            self._told_of_code = told_of_code(self._compiled)
        unique_nodes(module)
        copied = fx.GraphModule(module, copy.deepcopy(module.graph))
        try:
            region = self._region_of(Joint(copied))
        except Exception as error:  # whatever goes wrong with a joint graph: compile the user's code as torch would
            self._cannot_plan(error)
            return default(module, inputs, **options)
        region.forgotten = False
        self._split.append(region)
        self.seen.append(region)
        if region.lives is None:
            region.unplanned = halves_of(*(halves := default(module, inputs, **options)))
            return halves
        # Inductor's reordering would undo the plan's order. Where it was tried, it lowered no peak and raised some.
        _set(self._own_order, inductor_config(), "reorder_for_peak_memory", False)
        try:
            halves = as_written(copied, inputs, **options)
            halves[1].meta[PLANNED] = True
            return halves
        except Exception as error:
            self._cannot_plan(error)
            region.forgotten = True  # it is not a stage of a step any more
            self._own_order.close()
            return default(module, inputs, **options)

    def _cannot_plan(self, error: Exception) -> None:
        self.opaque[str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"] = None

    def _region_of(self, joint: Joint) -> Region:
        """The region with this graph. If it has a plan, the plan is written into the graph."""
        key = key_of(joint)
        region = self.by_key.get(key)
        if region is None:
            region = self.by_key[key] = Region(joint)
            recalled = self._recall(key)
            with contextlib.suppress(LoweringError):  # the file's plan is for another graph
                if recalled is not None:
                    rewrite(joint, recalled)
                    region.lives = recalled
        elif region.lives is not None:
            rewrite(joint, region.lives)
        return region

    def _compiled(self, code: CodeType, _: CodeType) -> None:
        """Dynamo has just compiled this code: the regions that were split during this belong to it."""
        for region in self._split:
            region.codes.add(code)
        self._split.clear()
        self._own_order.close()
