"""The order of the kernels that Inductor makes from a graph. It is read from Inductor's scheduler, and a better one is given
back.

This uses Inductor's setting `_post_fusion_custom_pass`: a function that gets the fused kernels and returns them in some order.
The kernels themselves do not change, so their results have the same bits. Afterwards Inductor tries its own orders, and uses
one of them only if it estimates fewer bytes for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from lightning_memopt.record import Listening, Seams
from lightning_memopt.torch_private import (
    NEVER_MOVED,
    estimated_peak,
    inductor_compiles,
    inductor_config,
    inductors_order,
    kernel_buffers,
    scheduler_pass_class,
)

BEFORE = -1
"""The maker of a buffer that is in memory when the code begins."""


@dataclass(frozen=True)
class Kernels:
    """What is needed to choose an order of kernels. They are numbered in the order in which Inductor would run them.

    before: kernel -> those that must run before it.
    makers: buffer -> the kernel that allocates it, or `BEFORE`.
    users: buffer -> the kernels that use it. It is freed after the last of them.
    nbytes: buffer -> bytes.
    stays: buffers that the code returns.
    """

    before: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    stays: frozenset[int]


Ordering = Callable[[Kernels], Sequence[int] | None]
"""The kernels in another order; None to leave the order as it is."""
_Asked = tuple[int, Ordering]


def kernels_of(nodes: Sequence[Any]) -> Kernels | None:
    """The kernels of a scheduler, after its `inductors_order` was computed; None if a kernel among them must not be moved.

    Convolutions take workspaces that nobody can know before they run. With convolutions, an order that needs fewer bytes by
    Inductor's estimate may really need more: Inception's measured peak was 1.1 % higher.
    """
    parts = [[part.node for part in node.get_nodes()] for node in nodes]
    if any(type(part).__name__ in NEVER_MOVED or _convolves(part) for of_node in parts for part in of_node):
        return None
    place = {node: i for i, node in enumerate(nodes)}
    before = [{place[other] for other in node.mpi_node.pred_nodes} for node in nodes]
    drawing = [i for i, of_node in enumerate(parts) if any(map(_draws, of_node))]
    for first, second in pairwise(drawing):  # what a kernel draws from a generator depends on which kernels drew before it
        before[second].add(first)
    makers: list[int] = []
    users: list[tuple[int, ...]] = []
    sizes: list[int] = []
    stays: set[int] = set()
    for buffer in kernel_buffers(nodes):
        if not buffer.nbytes:
            continue
        if buffer.returned:
            stays.add(len(makers))
        makers.append(BEFORE if buffer.maker is None else place[buffer.maker])
        users.append(tuple(sorted({place[user] for user in buffer.users})))
        sizes.append(buffer.nbytes)
    return Kernels(tuple(tuple(sorted(ops)) for ops in before), tuple(makers), tuple(users), tuple(sizes), frozenset(stays))


def _convolves(part: Any) -> bool:
    names = type(part).__name__, getattr(part, "python_kernel_name", ""), getattr(part, "op_overload", "")
    return "convolution" in " ".join(map(str, names)).lower()


def _draws(part: Any) -> bool:
    """Whether a kernel draws from a generator. (Inductor's own random ops read seeds. One kernel draws all seeds.)"""
    tags = getattr(getattr(part, "op_overload", None), "tags", ())
    return any(str(tag).endswith("nondeterministic_seeded") for tag in tags)


def _ordered(nodes: list[Any], ordering: Ordering) -> list[Any]:
    picked = inductors_order(nodes)
    kernels = kernels_of(picked)
    sequence = None if kernels is None else ordering(kernels)
    if sequence is None:
        return nodes
    better = [picked[i] for i in sequence]
    return better if estimated_peak(better) < estimated_peak(picked) else nodes


@cache
def _pass_class(base: type) -> Any:
    class Pass(base):
        """A class that Inductor can copy and pickle as a setting. Inductor also asks it for an identity, which is part of the
        key of cached code.
        """

        def __init__(self, users: Any) -> None:
            self._users = users

        def __call__(self, nodes: list[Any]) -> list[Any]:
            if self._users is not None:
                nodes = self._users(nodes)
            here = threading.get_ident()
            for thread, ordering in tuple(_seams.listeners):
                if thread == here:
                    with contextlib.suppress(Exception):  # whatever goes wrong here: the scheduler's own order is valid
                        nodes = _ordered(nodes, ordering)
            return nodes

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (str(self.uuid()),)

        def uuid(self) -> Any:
            return "lightning_memopt", None if self._users is None else self._users.uuid()

    return Pass


def _in_place_of(users: Any) -> Any:
    """The pass to set. `users`: the user's own pass, or None. A user's pass without an identity is left as it is, because
    Inductor must not cache code that it has changed.
    """
    base = scheduler_pass_class()
    return users if base is None or not (users is None or isinstance(users, base)) else _pass_class(base)(users)


_seams: Seams[_Asked] = Seams(lambda: [(inductor_config(), "_post_fusion_custom_pass", _in_place_of)])


def asked_to_order(ordering: Ordering) -> list[Listening]:
    """Context managers to enter so that Inductor calls `ordering(kernels)` for the order of what it compiles in this thread."""
    return [(_seams, (threading.get_ident(), ordering))] if inductor_compiles() else []
