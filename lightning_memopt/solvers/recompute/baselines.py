"""Baselines: the policies that frameworks ship, with the same interface as any other solver.

Input: an observed graph, and its stages or layers if the policy is about them. Output: lives. No policy looks at bytes.
Source: Chen, Xu, Zhang, Guestrin, *Training deep nets with sublinear memory cost* (2016): `mirror` is its "drop the
results of low cost operations" as Echo (ISCA 2020, V-B) describes and measures it. Policies that no command of the package
shows are in benchmarks/lib/baselines.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.solvers.recompute.echo import just_in_time
from lightning_memopt.solvers.recompute.footprint import Footprint
from lightning_memopt.solvers.recompute.stages import Stages, cut
from lightning_memopt.solvers.recompute.windows import unit_calls
from lightning_memopt.solvers.rollout import Rollout, unrepeatable


def mirror(graph: Graph) -> tuple[Life, ...]:
    """Run every light op again and hold the results of the others, even if an op's inputs are larger than its outputs.

    As in the framework that Echo is compared with: dropout is not run again, and the backward of a heavy op reads what the
    forward gave it (Echo, fig. 14c), so that is held too.
    """
    path = Footprint(graph)
    for op in graph.forward:
        if op.state_nbytes and op.id in path.ops:
            path.remove({op.id}, only_if_no_worse=False)
    held = set()
    for save in graph.saves:
        if save.op < len(graph.forward) and graph.ops[save.op].heavy and graph.packed(save) in graph.ops[save.op].inputs:
            held.add(save.tensor)
    return just_in_time(path, held)


def recompute_everything(graph: Graph, stages: Stages | None = None) -> tuple[Life, ...]:
    """Hold no boundary: each stage's backward begins with a run from the start of the forward."""
    stages = stages or cut(graph)
    roll = Rollout(graph)
    for span in reversed(stages.spans):
        roll.serve(span.unpacks, set(stages.given))
    return roll.lives()


def per_layer(graph: Graph, layers: Collection[str]) -> tuple[Life, ...]:
    """torch.utils.checkpoint around each of these layers (names of modules): what enters or leaves a layer is held. When the
    backward of the layer begins, all of its ops that backward needs run again.
    """
    return _checkpointed(graph, _calls(graph, layers).values())


def per_unit(graph: Graph) -> tuple[Life, ...]:
    """torch.utils.checkpoint around each unit that frees its gathered weights after its forward; `keep_all` if there is no such
    unit. Tensors that autograd asks for while the weights are away are held, too.
    """
    return _checkpointed(graph, unit_calls(graph))


def _checkpointed(graph: Graph, calls: Collection[Sequence[int]]) -> tuple[Life, ...]:
    """`calls`: the ids of the forward ops of each part that is checkpointed."""
    call_of = {op: i for i, ops in enumerate(calls) for op in ops}
    held = {t for t, op in graph.producers.items() if op.id not in call_of}
    for op in graph.forward:
        held.update(t for t in op.inputs if t in graph.producers and call_of.get(graph.producers[t].id) != call_of.get(op.id))
    held = held - graph.overwritten | unrepeatable(graph)
    roll = Rollout(graph)
    for i, ops in enumerate(calls):
        weights = {t for o in ops for t in graph.ops[o].inputs if graph.tensors[t].windows}
        saved = [(point, save.tensor) for save in graph.saves if call_of.get(save.op) == i for point in save.unpacked_at]
        unpacks = [(p, tensor) for p, tensor in saved if all(graph.tensors[t].there(p) for t in weights)]
        held.update({tensor for _, tensor in saved}.difference(tensor for _, tensor in unpacks))
        if unpacks:
            roll.run(min(unpacks)[0], roll.closure([tensor for _, tensor in unpacks], held))
    return roll.lives()


def _calls(graph: Graph, layers: Collection[str]) -> dict[tuple[str, int], list[int]]:
    """The forward ops of every call of these layers, by the layer's name and the number of the call."""
    modules = [op.scope.partition("#") for op in graph.forward]
    times: dict[str, int] = {}  # how often each module was called
    for name, _, call in modules:
        times[name] = max(times.get(name, 1), int(call or 0) + 1)
    calls: dict[tuple[str, int], list[int]] = {}
    for op, (name, _, call) in zip(graph.forward, modules, strict=True):
        layer = next((layer for layer in layers if name == layer or name.startswith(f"{layer}.")), None)
        if layer is not None:  # a module inside may be called several times in each call of the layer
            calls.setdefault((layer, int(call or 0) * times.get(layer, 1) // times[name]), []).append(op.id)
    return calls
