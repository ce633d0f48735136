"""Write the lives of a plan into a joint graph: ops that run again are nodes of the backward.

A plan's rebuild at an unpack point becomes copies of forward nodes right before the backward node that reads. The compiled code
saves whatever the backward then still reads of the forward. The user's checkpointing consists of marks on nodes; they are
removed, because the plan decides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from lightning_memopt.compiled.joint import Joint
from lightning_memopt.plan import Life, Rebuild, lower
from lightning_memopt.torch_private import CHECKPOINT_TAG, PARTITIONER_TAG


class _Copies:
    """Makes copies of forward nodes, and knows which node has a tensor at the current place in the backward.

    joint: the graph.
    kept: tensor -> the node that has it from its rebuild on.
    made: how many ops were copied.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.kept: dict[int, fx.Node] = {}
        self.made = 0
        self._segment: dict[int, fx.Node] = {}
        self._views: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def run(self, op: fx.Node, before: fx.Node) -> None:
        """Copy an op to the place right before a node."""
        copied = self._copy(op, before)
        self.made += 1
        for tensor in self.joint.made[op]:
            maker = self.joint.makers[tensor]
            self._segment[tensor] = copied if maker is op else self._item(copied, maker, before)

    def ends(self, born: Iterable[int]) -> None:
        """A segment is over: keep only these of the tensors that it made."""
        for tensor in born:
            if tensor in self._segment:
                self.kept[tensor] = self._segment[tensor]
        self._segment = {}

    def instead(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node to read instead of a node of the unmodified graph."""
        joint = self.joint
        tensor = joint.of_node.get(node)
        if tensor is None:
            return node
        maker = joint.makers[tensor]
        source = self._segment.get(tensor) or self.kept.get(tensor) or maker
        if node is maker or node not in joint.views:
            return source
        if node in joint.backward and source is maker:
            return node
        return self._view(node, source, before)

    def _view(self, node: fx.Node, source: fx.Node, before: fx.Node) -> fx.Node:
        key = (node, source)
        if key not in self._views:
            self._views[key] = self._copy(node, before)
        return self._views[key]

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        arguments = {n: self.instead(n, before) for n in node.all_input_nodes}
        with self.joint.module.graph.inserting_before(before):
            copied = self.joint.module.graph.node_copy(node, arguments.__getitem__)
        return _of_backward(copied, node.meta)

    def _item(self, copied: fx.Node, item: fx.Node, before: fx.Node) -> fx.Node:
        with self.joint.module.graph.inserting_before(before):
            new = self.joint.module.graph.create_node("call_function", operator.getitem, (copied, item.args[1]), {})
        return _of_backward(new, item.meta)


def _of_backward(node: fx.Node, meta: dict[str, Any]) -> fx.Node:
    node.meta = {**meta, PARTITIONER_TAG: "is_backward"}
    return node


def rewrite(joint: Joint, lives: Iterable[Life]) -> int:
    """Change the joint graph so that its backward runs ops again as the lives say. Returns how many ops. Raises
    LoweringError.
    """
    for node in joint.module.graph.nodes:
        node.meta.pop(CHECKPOINT_TAG, None)
    lives = tuple(lives)
    schedule = lower(joint.graph, lives)
    born: dict[int, list[int]] = {}
    for life in lives:
        if life.how == "rebuild":
            born.setdefault(life.born_at, []).append(life.tensor)
    copies = _Copies(joint)
    for op in joint.ops:
        if op not in joint.backward:
            continue
        for point, _ in joint.unpacks[op]:
            for step in schedule.segments.get(point, ()):
                if isinstance(step, Rebuild):
                    copies.run(joint.ops[step.op], op)
            copies.ends(born.get(point, ()))
        op.args = fx.map_arg(op.args, lambda node, op=op: copies.instead(node, op))  # type: ignore[misc]
        op.kwargs = fx.map_arg(op.kwargs, lambda node, op=op: copies.instead(node, op))  # type: ignore[misc]
    joint.module.graph.lint()
    joint.module.recompile()
    return copies.made
