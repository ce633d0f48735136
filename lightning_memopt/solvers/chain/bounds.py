"""The bytes that a branch of the chain's recurrence needs, and the smallest budget that any schedule can meet.

`SweepNeeds` gives, for a fixed first stage, the bytes that a sweep up to each checkpoint needs. Both the table and the min-max
recurrence below use it. `minimum_budget` is exact in bytes: P(s,t), the smallest M with a schedule, obeys

    P(s,t) = min( max(need(s,s',t), x_s + P(s',t), P(s,s'-1))                          for s' in s+1..t
                  max(base + x_s + forward_peak_o, x_s + backward_peak_o, x_s + held_o + P(s+1,t))   for options o )

and P(t,t) is the cheapest of Rebuild (t not last) and the options. O(L^3) work in O(L^2) vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_memopt.solvers.chain.model import Chain, Checkpoint, CheckpointTree, Hold, Rebuild

_NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True)
class SweepNeeds:
    """Bytes that a sweep from stage `first` needs. Index i is for the checkpoint at first+1+i; both arrays never decrease.

    `own` is for the user's own forward and includes the base of each stage. `rerun` does not include a base: in a rerun, the
    base is that of the stage whose backward comes next, the same for the whole sweep.
    """

    own: npt.NDArray[np.int64]
    rerun: npt.NDArray[np.int64]

    @classmethod
    def of(cls, chain: Chain, first: int) -> SweepNeeds:
        stages = chain.stages[first:-1]
        x_first = chain.stages[first].input_nbytes
        peak = np.array([s.sweep_peak_nbytes for s in stages], dtype=np.int64)
        peak += np.array([s.input_nbytes for s in stages], dtype=np.int64)
        peak[1:] += x_first  # stage `first` reads x_first as its input; for the other stages it is additional memory
        base = np.array([s.forward_base_nbytes for s in stages], dtype=np.int64)
        return cls(own=np.maximum.accumulate(peak + base), rerun=np.maximum.accumulate(peak))

    def upto(self, chain: Chain, first: int, t: int) -> npt.NDArray[np.int64]:
        """Bytes needed for the checkpoints at first+1..t, including the input of `first` and the base."""
        if t == len(chain.stages) - 1:
            return self.own[: t - first]
        return self.rerun[: t - first] + chain.stages[t].backward_base_nbytes


def base_nbytes(chain: Chain, k: int, t: int) -> int:
    """Bytes that no plan changes while stage k runs forward before the backward of t (the user's own forward if t is last)."""
    stage = chain.stages
    return stage[k].forward_base_nbytes if t == len(stage) - 1 else stage[t].backward_base_nbytes


def option_need_nbytes(chain: Chain, s: int, t: int, option: int) -> int:
    """Bytes, including x_s, that holding `option` at stage s needs for its own forward and its own backward."""
    stage = chain.stages[s]
    o = stage.options[option]
    return stage.input_nbytes + max(base_nbytes(chain, s, t) + o.forward_peak_nbytes, o.backward_peak_nbytes)


def minimum_table(chain: Chain) -> npt.NDArray[np.int64]:
    """P, shape (L, L), upper triangle: the fewest bytes (including x_s) in which the backward of stages t..s can be done."""
    length = len(chain.stages)
    table = np.full((length, length), _NEVER, dtype=np.int64)
    for s in range(length - 1, -1, -1):
        needs = SweepNeeds.of(chain, s)
        x_s = chain.stages[s].input_nbytes
        row = table[s]
        for t in range(s, length):
            best = min((_option_floor(chain, table, s, t, o) for o in range(len(chain.stages[s].options))), default=_NEVER)
            if s == t < length - 1:
                best = min(best, x_s + chain.stages[s].rebuild_peak_nbytes)
            elif t > s:
                branch = np.maximum(needs.upto(chain, s, t), table[s + 1 : t + 1, t] + x_s)
                np.maximum(branch, row[s:t], out=branch)
                best = min(best, int(branch.min()))
            row[t] = best
    return table


def _option_floor(chain: Chain, table: npt.NDArray[np.int64], s: int, t: int, option: int) -> int:
    need = option_need_nbytes(chain, s, t, option)
    if s == t:
        return need
    stage = chain.stages[s]
    return max(need, stage.input_nbytes + stage.options[option].held_nbytes + int(table[s + 1, t]))


def minimum_budget(chain: Chain) -> int:
    """The smallest budget in bytes for which a schedule exists, including the chain's input. Exact."""
    return int(minimum_table(chain)[0, -1])


def smallest_tree(chain: Chain) -> CheckpointTree:
    """A schedule whose peak is `minimum_budget(chain)`; its seconds are not optimal."""
    table = minimum_table(chain)
    built: list[CheckpointTree] = []
    todo: list[tuple[str, int, int, int]] = [("solve", 0, len(chain.stages) - 1, 0)]
    while todo:
        action, s, t, choice = todo.pop()
        if action == "checkpoint":
            left, right = built.pop(), built.pop()
            built.append(Checkpoint(s, choice, right, left))
        elif action == "hold":
            built.append(Hold(s, choice, built.pop()))
        else:
            floors = [_option_floor(chain, table, s, t, o) for o in range(len(chain.stages[s].options))]
            option = int(np.argmin(floors)) if floors else -1
            if s == t:
                rebuild = chain.stages[s].input_nbytes + chain.stages[s].rebuild_peak_nbytes
                lazy = t < len(chain.stages) - 1 and (option < 0 or rebuild <= floors[option])
                built.append(Rebuild(s) if lazy else Hold(s, option, None))
                continue
            x_s = chain.stages[s].input_nbytes
            branch = np.maximum(SweepNeeds.of(chain, s).upto(chain, s, t), table[s + 1 : t + 1, t] + x_s)
            np.maximum(branch, table[s, s:t], out=branch)
            at = int(branch.argmin())
            if option >= 0 and floors[option] <= branch[at]:
                todo += [("hold", s, t, option), ("solve", s + 1, t, 0)]
            else:
                at += s + 1
                todo += [("checkpoint", s, t, at), ("solve", s, at - 1, 0), ("solve", at, t, 0)]
    return built.pop()
