"""Choose the version that an observed step evicts next, as in dynamic tensor rematerialisation (Kirisame et al., 2021): one
with many bytes that few ops rebuild, and that was made many ops ago.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from lightning_memopt.runtime.engine.holding import Version

_CANDIDATES = 64
"""Number of versions, those with the largest bytes times age, whose rebuild costs are compared before one is evicted. (Appendix
E of the paper compares a random sample.) Comparing all versions took most of the time of a step of 15,000 ops.
"""


def next_evicted(candidates: Sequence[Version], clock: int, tape: Mapping[int, Version]) -> Version | None:
    """The candidate with the largest bytes times age divided by the cost of a rebuild; the first of several; None without any.

    clock: number of ops so far.
    tape: the versions by id.
    """
    gains = [(v.nbytes * (clock + 1 - v.call.op), -i) for i, v in enumerate(candidates) if v.call is not None]
    best, chosen = 0.0, None
    for gain, i in heapq.nlargest(_CANDIDATES, gains):
        if chosen is not None and gain / 2.0 <= best:
            break  # a rebuild runs at least one call
        merit = gain / (1.0 + _depth(candidates[-i], tape))
        if chosen is None or merit > best:
            best, chosen = merit, candidates[-i]
    return chosen


def _depth(version: Version, tape: Mapping[int, Version]) -> int:
    """An estimate of a rebuild's cost: the number of calls that it would run now, counted up to 64."""
    count, wanted, seen = 0, [version], {version.id}
    while wanted and count < 64:
        call = wanted.pop().call
        count += 1
        if call is not None:
            for id in call.reads:
                source = tape[id]
                if source.holding.value is None and source.id not in seen and source.call is not None:
                    seen.add(source.id)
                    wanted.append(source)
    return count
