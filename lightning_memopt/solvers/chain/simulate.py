"""An interpreter of chain schedules, independent of the solver: it tracks what is held and adds up what is run.

In: a chain and a checkpoint tree. Out: the explicit operations, the extra seconds, the peak bytes. It shares no code with
`table` (it has no recurrence and no buckets), so it can judge the trees that the solver returns.

The operations, in the order they run:

    ("forget", k)    run stage k forward and drop its input x_k when x_{k+1} is there
    ("keep", k)      run stage k forward and keep only its input x_k, nothing inside the stage
    ("hold", k, o)   run stage k forward, keep its input, hold the set of option o
    ("rebuild", k)   the next backward of stage k starts from its input alone
    ("backward", k)  run the backward of stage k; drops x_k, and the held set of k

Forward operations before the first backward are the user's own forward and cost nothing; later ones are reruns.
"""

from __future__ import annotations

from typing import TypeAlias

from lightning_memopt.errors import ChainError
from lightning_memopt.solvers.chain.model import Chain, Checkpoint, CheckpointTree, Hold, Rebuild

Operation: TypeAlias = tuple[str, int] | tuple[str, int, int]


def operations(tree: CheckpointTree) -> list[Operation]:
    """The operations of the tree, in the order in which they run. This is a loop, so that deep trees do not exhaust the
    stack.
    """
    out: list[Operation] = []
    todo: list[CheckpointTree | Operation | None] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, Checkpoint):
            out.append(("keep", node.first))
            out.extend(("forget", k) for k in range(node.first + 1, node.at))
            todo += [node.left, node.right]
        elif isinstance(node, Hold):
            out.append(("hold", node.stage, node.option))
            todo += [("backward", node.stage), node.rest]
        elif isinstance(node, Rebuild):
            out.append(("rebuild", node.stage))
            out.append(("backward", node.stage))
        elif node is not None:
            out.append(node)
    return out


def simulate(chain: Chain, tree: CheckpointTree) -> tuple[float, int]:
    """(extra seconds, peak bytes) of the tree on this chain. Raises ChainError if the tree cannot be run."""
    return simulate_operations(chain, operations(tree))


def simulate_operations(chain: Chain, ops: list[Operation]) -> tuple[float, int]:
    """(extra seconds, peak bytes) of an explicit list of operations. Raises ChainError if one of them cannot be run.

    The peak counts everything: the chain's input x_0, kept boundaries, held sets, base, workspaces and gradients.
    """
    stages = chain.stages
    last = len(stages) - 1
    boundary: dict[int, int] = {0: stages[0].input_nbytes}
    held: dict[int, tuple[int, int]] = {}  # stage -> (option, nbytes)
    rebuilding: int | None = None
    due = last  # the stage whose backward comes next
    seconds, peak = 0.0, 0

    for position, op in enumerate(ops):
        kind, k = op[0], op[1]
        where = f"operation {position} {op}: "
        if k not in boundary:
            raise ChainError(f"{where}the input of stage {k} is not held; held are {sorted(boundary)}: keep it before")
        if k > due:
            raise ChainError(f"{where}stage {k} comes after stage {due}, whose backward is next: run that first")
        stage = stages[k]
        outside = sum(boundary.values()) + sum(nbytes for _, nbytes in held.values())
        own_pass = due == last
        base = stage.forward_base_nbytes if own_pass else stages[due].backward_base_nbytes
        if kind in ("keep", "forget"):
            seconds += 0.0 if own_pass else stage.sweep_seconds
            peak = max(peak, outside + base + stage.sweep_peak_nbytes)
            if kind == "forget":
                del boundary[k]
            boundary[k + 1] = stages[k + 1].input_nbytes
        elif kind == "hold":
            option = stage.options[op[2]]  # type: ignore[misc]
            seconds += 0.0 if own_pass else option.rerun_seconds
            peak = max(peak, outside + base + option.forward_peak_nbytes)
            held[k] = (op[2], option.held_nbytes)  # type: ignore[misc]
            if k < due:
                boundary[k + 1] = stages[k + 1].input_nbytes
        elif kind == "rebuild":
            if own_pass:
                raise ChainError(f"{where}the last stage is run by the user's own forward: hold it with an option")
            rebuilding = k
        elif kind == "backward":
            if k != due:
                raise ChainError(f"{where}the next backward is that of stage {due}, not of {k}: change their order")
            if k in held:
                option_index, own_nbytes = held.pop(k)
                option = stage.options[option_index]
                seconds += option.rebuild_seconds
                peak = max(peak, outside - own_nbytes + option.backward_peak_nbytes)
            elif rebuilding == k:
                rebuilding = None
                seconds += stage.rebuild_seconds
                peak = max(peak, outside + stage.rebuild_peak_nbytes)
            else:
                raise ChainError(f"{where}nothing of stage {k} is held, and no rebuild was asked for: add one of them")
            del boundary[k]
            due -= 1
        else:
            raise ChainError(f"{where}unknown operation: use keep, forget, hold, rebuild or backward")
    if due != -1:
        raise ChainError(f"the schedule ends with the backward of stages 0..{due} not done: add it")
    return seconds, peak
