"""A training step computed layer by layer: shapes in, a `Graph` out, as the tracer would observe it of an eager PyTorch.

Feature maps are float32, N x C x H x W. What autograd saves is what PyTorch's nodes save: a convolution, a normalisation and a
linear layer their input, a ReLU its output, max pooling its input and int64 indices, dropout a mask. Backward goes through the
nodes in reverse order of their forward; where two gradients of one map meet, the second is added to the first. Parameters
exist before the step with their gradient and momentum. FLOPs: 2 per multiply-add; an op takes what the roofline of `device`
says, its FLOP rate times `efficiency`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from lightning_memopt.graph import BEFORE, Graph, Op, Point, Save, Tensor
from lightning_memopt.plan.rates import Device

Shape = tuple[int, ...]
FLOAT, LONG = 4, 8


@dataclass(frozen=True, slots=True)
class Map:
    """What a layer made."""

    tensor: int
    shape: Shape


@dataclass
class _Node:
    """What backward does for one forward op. `saves` are tensors as they are packed; `ways`: inputs that need a gradient."""

    op: int
    name: str
    out: int
    ways: tuple[int, ...]
    saves: tuple[int, ...]
    flops: int
    moved_nbytes: int
    views: bool = False
    """The gradient is handed on as it is (an addition), or in pieces of it (a concatenation)."""


@dataclass
class Net:
    """Layers are added in order; `build` gives the step. `device` prices its ops."""

    device: Device
    efficiency: float
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)

    # -- layers ------------------------------------------------------------------------------------

    def input(self, *shape: int) -> Map:
        return Map(self._tensor("images", shape, "input", BEFORE), shape)

    def conv(self, x: Map, out: int, kernel: int | tuple[int, int], stride: int = 1, pad: int | tuple[int, int] = 0) -> Map:
        """Convolution without groups; kernels and paddings may differ by axis."""
        n, c, h, w = x.shape
        kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
        ph, pw = (pad, pad) if isinstance(pad, int) else pad
        shape = (n, out, (h + 2 * ph - kh) // stride + 1, (w + 2 * pw - kw) // stride + 1)
        self._parameter("convolution", (out, c, kh, kw))
        flops = 2 * prod(shape) * c * kh * kw
        first = x.tensor not in {node.out for node in self.nodes}
        return self._layer("aten::convolution", (x,), shape, (x.tensor,), flops, flops * (1 if first else 2), heavy=True)

    def relu(self, x: Map) -> Map:
        return self._layer("aten::relu", (x,), x.shape, ("out",), prod(x.shape), prod(x.shape))

    def norm(self, x: Map) -> Map:
        """Batch normalisation with batch statistics; mean and inverse deviation are saved too."""
        self._parameter("native_batch_norm", (2 * x.shape[1],))
        more = ((2 * x.shape[1],), FLOAT)
        n = prod(x.shape)
        return self._layer("aten::native_batch_norm", (x,), x.shape, (x.tensor, "more"), 5 * n, 8 * n, more=more, passes=2)

    def lrn(self, x: Map) -> Map:
        """Local response normalisation as one layer that keeps its input and its scale (cuDNN's; PyTorch composes it)."""
        n = prod(x.shape)
        return self._layer(
            "local_response_norm", (x,), x.shape, (x.tensor, "more"), 12 * n, 20 * n, more=(x.shape, FLOAT), passes=2
        )

    def max_pool(self, x: Map, kernel: int, stride: int, pad: int = 0, ceil: bool = False) -> Map:
        shape = self._pooled(x, kernel, stride, pad, ceil)
        flops = prod(shape) * kernel * kernel
        name = "aten::max_pool2d_with_indices"
        return self._layer(name, (x,), shape, (x.tensor, "more"), flops, prod(shape), more=(shape, LONG))

    def avg_pool(self, x: Map, kernel: int, stride: int, pad: int = 0) -> Map:
        shape = self._pooled(x, kernel, stride, pad, False)
        flops = prod(shape) * kernel * kernel
        return self._layer("aten::avg_pool2d", (x,), shape, (x.tensor,), flops, flops)

    def pool_all(self, x: Map) -> Map:
        """Mean over height and width: only sizes are saved."""
        return self._layer("aten::mean.dim", (x,), (*x.shape[:2], 1, 1), (), prod(x.shape), prod(x.shape))

    def add(self, x: Map, y: Map) -> Map:
        return self._layer("aten::add.Tensor", (x, y), x.shape, (), prod(x.shape), 0, views=True)

    def concat(self, *maps: Map) -> Map:
        n, _, h, w = maps[0].shape
        return self._layer("aten::cat", maps, (n, sum(m.shape[1] for m in maps), h, w), (), 0, 0, views=True)

    def linear(self, x: Map, out: int) -> Map:
        n, features = x.shape[0], prod(x.shape[1:])
        self._parameter("addmm", (out, features))
        flops = 2 * n * features * out
        return self._layer("aten::addmm", (x,), (n, out), (x.tensor,), flops, 2 * flops, heavy=True)

    def dropout(self, x: Map) -> Map:
        n = prod(x.shape)
        return self._layer("aten::native_dropout", (x,), x.shape, ("more",), 2 * n, n, more=(x.shape, 1), state=16)

    def softmax(self, x: Map) -> Map:
        """Logarithm of softmax; the loss is taken to read it at no cost."""
        return self._layer("aten::_log_softmax", (x,), x.shape, ("out",), 4 * prod(x.shape), 4 * prod(x.shape))

    # -- inside ------------------------------------------------------------------------------------

    @staticmethod
    def _pooled(x: Map, kernel: int, stride: int, pad: int, ceil: bool) -> Shape:
        n, c, *sides = x.shape
        up = stride - 1 if ceil else 0
        return (n, c, *((side + 2 * pad - kernel + up) // stride + 1 for side in sides))

    def _tensor(self, name: str, shape: Shape, kind: str, born_at: int, size: int = FLOAT) -> int:
        id = len(self.tensors)
        dtype = {FLOAT: "float32", LONG: "int64", 1: "bool"}[size]
        self.tensors.append(
            Tensor(
                id=id,
                name=name,
                nbytes=prod(shape) * size,
                kind=kind,  # type: ignore[arg-type]
                storage=id,
                born_at=born_at,
                freed_at=born_at,
                dtype=dtype,
                size=shape,
            )
        )
        return id

    def _parameter(self, name: str, shape: Shape) -> None:
        """Weights, their gradient and their momentum."""
        for kind in ("parameter", "gradient", "optimizer_state"):
            self._tensor(f"{name} {kind}", shape, kind, BEFORE)

    def _seconds(self, flops: int, nbytes: int) -> float:
        return self.device.op_seconds(round(flops / self.efficiency), nbytes)

    def _layer(
        self,
        name: str,
        inputs: Sequence[Map],
        shape: Shape,
        saves: Sequence[int | str],
        flops: int,
        backward_flops: int,
        *,
        more: tuple[Shape, int] | None = None,
        heavy: bool = False,
        state: int = 0,
        views: bool = False,
        passes: int = 1,
    ) -> Map:
        """An op. `more`: a second output, saved; `passes`: how often it reads its inputs."""
        at = len(self.ops)
        out = self._tensor(f"{name} {at}", shape, "activation", at)
        outputs = [out]
        if more is not None:
            outputs.append(self._tensor(f"{name} {at}, saved", more[0], "activation", at, more[1]))
        read = sum(self.tensors[m.tensor].nbytes for m in inputs)
        made = sum(self.tensors[t].nbytes for t in outputs)
        moved = passes * read + made
        self.ops.append(
            Op(
                id=at,
                name=name,
                phase="forward",
                inputs=tuple(m.tensor for m in inputs),
                outputs=tuple(outputs),
                seconds=self._seconds(flops, moved),
                flops=flops,
                heavy=heavy,
                recomputable=True,
                state_nbytes=state,
                at=at,
            )
        )
        packs = tuple(out if t == "out" else outputs[-1] if t == "more" else int(t) for t in saves)
        made_here = {node.out for node in self.nodes}
        ways = tuple(m.tensor for m in inputs if m.tensor in made_here)
        self.nodes.append(_Node(at, name, out, ways, packs, backward_flops, passes * (read + 2 * made), views))
        return Map(out, shape)

    def build(self) -> Graph:
        """The step: the forward, then each node in reverse."""
        points = [Point("op", i) for i in range(len(self.ops))]
        ops, tensors = list(self.ops), list(self.tensors)
        for op in self.ops:
            for t in (*op.inputs, *op.outputs):
                tensors[t] = replace(tensors[t], freed_at=op.at)
        saves: list[Save] = []
        of_node: dict[int, list[int]] = {}
        for node in self.nodes:
            for t in node.saves:
                of_node.setdefault(node.op, []).append(len(saves))
                saves.append(Save(id=len(saves), tensor=t, op=node.op, unpacked_at=(), released_at=0))
        gradient: dict[int, int] = {}

        def made(name: str, nbytes: int) -> int:
            tensors.append(
                Tensor(
                    id=len(tensors),
                    name=name,
                    nbytes=nbytes,
                    kind="gradient",
                    storage=len(tensors),
                    born_at=len(points),
                    freed_at=len(points),
                    dtype="float32",
                )
            )
            return len(tensors) - 1

        def run(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], flops: int, nbytes: int) -> None:
            for t in inputs:
                if tensors[t].kind == "gradient" and tensors[t].born_at != BEFORE:
                    tensors[t] = replace(tensors[t], freed_at=len(points))
            seconds = self._seconds(flops, nbytes)
            at = len(points)
            ops.append(
                Op(
                    id=len(ops),
                    name=name,
                    phase="backward",
                    inputs=inputs,
                    outputs=outputs,
                    seconds=seconds,
                    flops=flops,
                    at=at,
                )
            )
            points.append(Point("op", len(ops) - 1))

        for node in reversed(self.nodes):
            mine = of_node.get(node.op, [])
            for s in mine:
                saves[s] = replace(saves[s], unpacked_at=(len(points),))
                points.append(Point("unpack", s))
            came = gradient.pop(node.out, None)
            read = ((came,) if came is not None else ()) + node.saves
            grads: tuple[int, ...] = ()
            if not node.views:
                grads = tuple(made(f"gradient of {tensors[t].name}", tensors[t].nbytes) for t in node.ways)
                run(f"{node.name} backward", read, grads, node.flops, node.moved_nbytes)
            for s in mine:
                saves[s] = replace(saves[s], released_at=len(points))
                points.append(Point("release", s))
            if node.views and came is not None:  # each input takes the gradient, or its piece, as a tensor of its own
                nbytes = tensors[came].nbytes
                split = len(node.ways) and sum(tensors[t].nbytes for t in node.ways) <= nbytes
                if split or any(t in gradient for t in node.ways):
                    grads = tuple(made(f"gradient of {tensors[t].name}", tensors[t].nbytes) for t in node.ways)
                    run(f"{node.name} backward", read, grads, 0, 2 * nbytes)
                else:  # one tensor that both ways hold: it lives until the second has read it
                    grads = (came,) * len(node.ways)
            for t, grad in zip(node.ways, grads, strict=True):
                if t in gradient:
                    total = made(f"gradient of {tensors[t].name}", tensors[t].nbytes)
                    run("aten::add.Tensor", (gradient[t], grad), (total,), prod(tensors[t].size), 3 * tensors[t].nbytes)
                    grad = total
                gradient[t] = grad
        end = len(points) - 1
        tensors = [replace(t, freed_at=end) if t.born_at == BEFORE else t for t in tensors]
        seconds = sum(op.seconds for op in ops)
        return Graph(
            ops=tuple(ops),
            tensors=tuple(tensors),
            saves=tuple(saves),
            points=tuple(points),
            device="cuda",
            step_seconds=seconds,
        )
