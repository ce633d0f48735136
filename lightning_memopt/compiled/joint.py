"""The joint graph of a compiled region, forward and backward in one FX graph, as a `Graph`.

Nodes that allocate memory become ops. A view does not become an op: whoever reads a view reads the memory behind it, and a plan
that makes the memory again makes the view again, too. Each forward result that a backward node reads is unpacked right before
that node, and released right after it: the compiled backward frees a tensor after its last reader, even where autograd would
have kept it longer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from lightning_memopt.compiled.sizes import UnreadableError, nbytes_of, number, symbols_of, tensors_of, with_numbers
from lightning_memopt.device.places import device_of_call
from lightning_memopt.graph import BEFORE, Graph, Op, Point, Save, Tensor
from lightning_memopt.record import rule_of
from lightning_memopt.record.rules import may_run_again
from lightning_memopt.torch_private import (
    CHECKPOINT_TAG,
    MUTATED_INPUT,
    PARTITIONER_TAG,
    WRITES_INPUT,
    HigherOrderOperator,
    OpOverload,
    inductor_config,
)

_FLOPS_PER_SECOND, _BYTES_PER_SECOND = 8e9, 1e9
"""Rates of an assumed machine. Only their ratio matters, because plans of a region are compared by FLOPs first."""
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_WIDE = 8
"""How many times as many columns logits have, at least, as what is multiplied to make them."""
_OF_SOFTMAX = ("amax", "softmax", "logsumexp")
"""Words in the names of ops that a softmax is, or of the first one of those into which inductor takes it apart."""
_SEEDED = ("inductor_lookup_seed", "inductor_random", "inductor_randint")
"""Inductor's random ops. They may run again: they give the same bits for the same seed, and seeds are kept."""
_NESTED = "invoke_subgraph"
"""The op that `nested_compile_region` becomes. All its calls have the same fake results, so one cannot tell which results share
memory.
"""
_EFFECTS = ("with_effects", "triton_kernel_wrapper_mutation", "call_torchbind", "print")
"""Operators that have a graph or a function of their own, and side effects."""


@dataclass
class _Reading:
    """What is known about the nodes while they are read in their order.

    tensor_of: storage of a fake tensor -> tensor id.
    of_node: node with a tensor -> id of the tensor that has its memory.
    makers: tensor id -> the node that returns the tensor: an op, or the `getitem` of an op with several results.
    nbytes: tensor id -> bytes.
    views: nodes whose memory belongs to another node.
    reads, made: op -> ids of the tensors that it reads or makes.
    alive: the fake tensors, kept alive so that no two storages have the same identity.
    """

    tensor_of: dict[int, int] = field(default_factory=dict)
    of_node: dict[fx.Node, int] = field(default_factory=dict)
    makers: list[fx.Node] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    views: set[fx.Node] = field(default_factory=set)
    reads: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    made: dict[fx.Node, list[int]] = field(default_factory=dict)
    alive: list[torch.Tensor] = field(default_factory=list)

    def tensor(self, value: torch.Tensor) -> int | None:
        return self.tensor_of.get(value.untyped_storage()._cdata)

    def new(self, node: fx.Node, value: torch.Tensor) -> int:
        id = len(self.nbytes)
        self.tensor_of[value.untyped_storage()._cdata] = id
        self.alive.append(value)
        self.nbytes.append(nbytes_of(value))
        self.makers.append(node)
        return id


class Joint:
    """A region's joint graph, after it was read.

    module: the FX graph. Only `rewriting` changes it.
    graph: the same as data.
    ops: op id -> its node.
    makers: tensor id -> the node that returns the tensor.
    of_node: node -> id of the tensor that has its memory.
    views: nodes whose memory belongs to another node.
    made: op -> ids of the tensors that it makes.
    unpacks: backward op -> (point, tensor) of each forward result that it reads.
    backward: the nodes after the last node of the forward.
    dynamic: whether the code also serves batches of other sizes. The sizes in the graph are those of the batch it was compiled
        for.
    checkpointed: whether the user's checkpointing marks ops that torch's split runs again. The graph still has each op only
        once.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        nodes = list(module.graph.nodes)
        _refuse(nodes)
        first = _begin_of_backward(nodes)
        self.backward = frozenset(node for node in nodes[first:] if node.meta.get(PARTITIONER_TAG) != WRITES_INPUT)
        self.dynamic = any(symbols_of(node.meta.get("val")) for node in nodes)
        self.checkpointed = any(node.meta.get(CHECKPOINT_TAG) is not None for node in nodes)
        reading = _Reading()
        for node in nodes:
            _read(reading, node)
        self.views, self.makers, self.made, self.of_node = reading.views, reading.makers, reading.made, reading.of_node
        self.ops = sorted(reading.reads, key=lambda node: node in self.backward)
        self.unpacks: dict[fx.Node, list[tuple[int, int]]] = {}
        self.graph = self._graph(reading, nodes)

    @property
    def logits_nbytes(self) -> int:
        """Bytes of the largest product of matrices in the forward that may be logits: it has at least `_WIDE` times as many
        columns as what it multiplies, and is a result of the region, or read by a softmax. 0 if there is none.
        """
        largest_nbytes = 0
        for node in self.ops:
            if node in self.backward or node.target not in _PRODUCTS:
                continue
            x = node.args[-2].meta["val"]  # type: ignore[union-attr]
            product = node.meta["val"]
            if number(product.size(-1)) >= _WIDE * number(x.size(-1)) and _are_scores(node):
                largest_nbytes = max(largest_nbytes, nbytes_of(product))
        return largest_nbytes

    def _graph(self, reading: _Reading, nodes: Sequence[fx.Node]) -> Graph:
        forward = [node for node in self.ops if node not in self.backward]
        written = _written(reading, self.ops) | _written_afterwards(reading, nodes)
        forward_made = {t for node in forward for t in reading.made[node]}
        points: list[Point] = []
        saves: list[Save] = []
        at: dict[fx.Node, int] = {}
        for i, node in enumerate(self.ops):
            unpacked = [t for t in reading.reads[node] if t in forward_made] if node in self.backward else []
            first_save = len(saves)
            self.unpacks[node] = [(len(points) + k, t) for k, t in enumerate(unpacked)]
            points += [Point("unpack", first_save + k) for k in range(len(unpacked))]
            at[node] = len(points)
            points.append(Point("op", i))
            for k, (point, t) in enumerate(self.unpacks[node]):
                released_at = len(points) + k
                saves.append(Save(id=first_save + k, tensor=t, op=len(forward), unpacked_at=(point,), released_at=released_at))
            points += [Point("release", first_save + k) for k in range(len(unpacked))]
        ops = tuple(self._op(reading, i, node, at[node], written) for i, node in enumerate(self.ops))
        return Graph(
            ops=ops,
            tensors=tuple(self._tensors(reading, nodes, forward_made, at, len(points) - 1)),
            saves=tuple(saves),
            points=tuple(points),
            device=_device(nodes),
            step_seconds=sum(op.seconds for op in ops),
        )

    def _tensors(
        self, reading: _Reading, nodes: Sequence[fx.Node], forward_made: set[int], at: dict[fx.Node, int], last: int
    ) -> Iterable[Tensor]:
        output = nodes[-1]
        returned = {self.of_node[node] for node in output.all_input_nodes if node in self.of_node}
        born = {t: at[node] for node in self.ops for t in reading.made[node]}
        read: dict[int, int] = {}
        for node in self.ops:
            for t in reading.reads[node]:
                if not (t in forward_made and node in self.backward):  # those that backward reads are saves
                    read[t] = at[node]
        for t, nbytes in enumerate(reading.nbytes):
            born_at = born.get(t, BEFORE)
            stays = born_at == BEFORE or t in returned
            kind = "parameter" if born_at == BEFORE else "activation" if t in forward_made else "gradient"
            freed_at = last if stays else max(read.get(t, born_at), born_at)
            name = reading.makers[t].name
            yield Tensor(id=t, name=name, nbytes=nbytes, kind=kind, storage=t, born_at=born_at, freed_at=freed_at)  # type: ignore[arg-type]

    def _op(self, reading: _Reading, id: int, node: fx.Node, at: int, written: set[int]) -> Op:
        flops, backward = flops_of(node), node in self.backward
        moved_nbytes = sum(reading.nbytes[t] for t in (*reading.reads[node], *reading.made[node]))
        return Op(
            id=id,
            name=str(node.target),
            phase="backward" if backward else "forward",
            inputs=reading.reads[node],
            outputs=tuple(reading.made[node]),
            seconds=moved_nbytes / _BYTES_PER_SECOND + flops / _FLOPS_PER_SECOND,
            flops=flops,
            heavy=flops > 0,
            recomputable=not backward and _may_run_again(node) and written.isdisjoint(reading.reads[node]),
            at=at,
        )


def _refuse(nodes: Iterable[fx.Node]) -> None:
    if inductor_config().triton.cudagraphs:
        raise UnreadableError("it runs as a CUDA graph (mode='reduce-overhead')")
    for node in nodes:
        if node.op in ("call_module", "call_method"):
            raise UnreadableError(f"it calls {node.target}, which is not an operator")
        if _has_graph(node) and str(node.target) == _NESTED:
            raise UnreadableError("it calls nested regions (nested_compile_region), which are planned separately")
        if _has_graph(node) and str(node.target) in _EFFECTS:
            raise UnreadableError(f"it has an operator with effects ({node.target}). Call it outside of compiled code")
        if str(node.target).startswith(("_c10d_functional", "c10d_functional")):
            raise UnreadableError("it has collectives")


def _begin_of_backward(nodes: Sequence[fx.Node]) -> int:
    """The index after the last node of the forward. Torch's default partitioner cuts at the same place."""
    lasts = [i for i, node in enumerate(nodes) if node.meta.get(PARTITIONER_TAG) == "is_forward" or _is_primal(node)]
    if not lasts:
        raise UnreadableError("it has no forward")
    return lasts[-1] + 1


def _has_graph(node: fx.Node) -> bool:
    """Whether the node's operator has a graph or a function of its own (`cond`, `flex_attention`, a custom op that writes).

    Such an operator never runs again. Its results are counted. The memory that it takes while it runs is known only after a
    step was measured.
    """
    return isinstance(node.target, HigherOrderOperator)


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" not in str(node.target)


def _read(reading: _Reading, node: fx.Node) -> None:
    value = node.meta.get("val")
    if node.op in ("placeholder", "get_attr"):
        if isinstance(value, torch.Tensor):
            known = reading.tensor(value)
            reading.of_node[node] = reading.new(node, value) if known is None else known
        return
    if node.op != "call_function" or isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return  # computing a size takes no time and no memory
    inputs = {reading.of_node[n] for n in node.all_input_nodes if n in reading.of_node}
    if node.target is operator.getitem:
        source = _giver(node)
        if source in reading.views:
            reading.views.add(node)
        if isinstance(value, torch.Tensor):
            tensor = reading.tensor(value)
            assert tensor is not None
            if reading.makers[tensor] is source:
                reading.makers[tensor] = node
            elif source not in reading.views:  # another result of the same op in the same memory
                raise UnreadableError(f"results of {source.target} share their memory. Let it return copies (clone)")
            reading.of_node[node] = tensor
        return
    values = tensors_of(value)
    shown = [reading.tensor(v) for v in values]
    if _has_graph(node) and not inputs.isdisjoint(shown):
        raise UnreadableError(f"a result of {node.target} is a view of what it reads. Let it return a copy (clone)")
    if values and not _mutates(node) and all(t in inputs for t in shown):
        reading.views.add(node)
        reading.alive += values
        reading.of_node[node] = shown[0]  # type: ignore[assignment]
        return
    reading.reads[node], reading.made[node] = tuple(sorted(inputs)), []
    for v in values:
        tensor = reading.tensor(v)
        if tensor is None:
            tensor = reading.new(node, v)
            reading.made[node].append(tensor)
        if isinstance(value, torch.Tensor):
            reading.of_node[node] = tensor


def _giver(item: fx.Node) -> fx.Node:
    """The node that returned this item, directly or inside a nested result."""
    source = item.args[0]
    assert isinstance(source, fx.Node)
    nested = source.target is operator.getitem and not isinstance(source.meta.get("val"), torch.Tensor)
    return _giver(source) if nested else source


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _written(reading: _Reading, ops: Iterable[fx.Node]) -> set[int]:
    """The memory that ops of the region write to, such as running statistics. An op that reads it may not run again."""
    return {reading.of_node[n] for op in ops if _mutates(op) for n in op.all_input_nodes[:1] if n in reading.of_node}


def _written_afterwards(reading: _Reading, nodes: Sequence[fx.Node]) -> set[int]:
    """The inputs into which the runtime copies a result after the forward's code has run."""
    descriptions = pytree.tree_leaves(nodes[-1].meta.get("desc"), is_leaf=lambda d: hasattr(d, MUTATED_INPUT))
    written = [getattr(d, MUTATED_INPUT) for d in descriptions if hasattr(d, MUTATED_INPUT)]
    inputs = [node for node in nodes if node.op == "placeholder" and node in reading.of_node]
    return {reading.of_node[node] for node in inputs if node.meta.get("desc") in written}


def _may_run_again(node: fx.Node) -> bool:
    func = node.target
    if not isinstance(func, OpOverload) or _mutates(node):
        return False
    if func._schema.name.partition("::")[2] in _SEEDED:
        return True
    device = next((t.device.type for t in tensors_of(node.meta.get("val"))), "cpu")
    return func.namespace in ("aten", "prims") and rule_of(func).handling == "pure" and may_run_again(func, device)


def flops_of(node: fx.Node) -> int:
    """FLOPs of a node; 0 where torch has no formula for its op."""
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return 0
    arguments = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs), node))
    args, kwargs, made = with_numbers(arguments)
    return int(formula(*args, **kwargs, out_val=made))


def _are_scores(product: fx.Node) -> bool:
    """Whether a softmax reads this product, or the region returns it: as it is, or after ops that read nothing else."""
    waiting = [product]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or any(name in str(user.target) for name in _OF_SOFTMAX):
                return True
            if len(user.all_input_nodes) == 1:
                waiting.append(user)
    return False


def _device(nodes: Iterable[fx.Node]) -> str:
    return device_of_call((t.device for node in nodes for t in tensors_of(node.meta.get("val"))), {}).type
