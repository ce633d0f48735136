"""The time axis cut into sections. A section stands for a time whose set of live buffers is not contained in that of any other
time.

Two buffers are live at the same time if and only if they share a section. So the search looks only at sections.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_memopt.solvers.placement.buffers import Ints, Problem

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Sections:
    """Buffers over sections. Arrays over buffers have shape (n,), those over sections shape (m,).

    first, last: half-open range of sections of every buffer.
    size: bytes of every buffer.
    load_nbytes: the live bytes in each section.
    """

    first: Indices
    last: Indices
    size: Ints
    load_nbytes: Ints

    @classmethod
    def of(cls, problem: Problem) -> Sections:
        """The sections of a problem of at least one buffer."""
        count = len(problem.times) - 1
        comes, goes = np.zeros(count + 1, dtype=bool), np.zeros(count + 1, dtype=bool)
        comes[problem.first], goes[problem.last] = True, True
        kept, grew = [], False
        for moment in range(count):
            grew |= bool(comes[moment])
            if goes[moment + 1] and grew:  # the set grew before, and shrinks now
                kept.append(moment)
                grew = False
        first = np.searchsorted(kept, problem.first).astype(np.int32)
        last = np.searchsorted(kept, problem.last).astype(np.int32)
        return cls(first, last, problem.size.copy(), problem.load_nbytes[kept])
