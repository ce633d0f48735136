"""An independent check of a sequence, with code of its own: sets of what is in memory, op by op."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memopt.solvers.ordering.problem import Problem


def faults(problem: Problem, sequence: Sequence[int], peak_nbytes: int | None = None) -> list[str]:
    """One line for every rule that a sequence breaks; none if it is right.

    The rules: every op runs once; no op runs before one that it must wait for; and the peak is `peak_nbytes`, if given.
    """
    lines = []
    if sorted(sequence) != list(range(len(problem))):
        return [f"{len(sequence)} numbers are not the {len(problem)} ops, each once"]
    ran: set[int] = set()
    alive = {buffer for buffer, maker in enumerate(problem.makers) if maker < 0}
    highest = problem.resident_nbytes
    for op in sequence:
        lines += [f"op {op} runs before op {other}" for other in problem.before[op] if other not in ran]
        alive |= {buffer for buffer, maker in enumerate(problem.makers) if maker == op}
        level = problem.resident_nbytes + problem.workspace[op] + sum(problem.nbytes[buffer] for buffer in alive)
        highest = max(highest, level)
        ran.add(op)
        alive = {buffer for buffer in alive if buffer in problem.stays or not set(problem.users[buffer]) <= ran}
    if peak_nbytes is not None and highest != peak_nbytes:
        lines.append(f"the peak is {highest} bytes, not {peak_nbytes}")
    return lines
