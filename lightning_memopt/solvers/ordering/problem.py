"""Ops to be put in order: precedence, and the buffers that are in memory while ops that use them are still to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_memopt.errors import OrderingError

Ints = npt.NDArray[np.int64]

BEFORE = -1
"""The maker of a buffer that is in memory when the step begins."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Ops are numbered from 0, in the order in which they were given: each comes after all ops that must run before it.

    before: op -> the ops that must run before it.
    makers: buffer -> the op that allocates it, or `BEFORE`.
    users: buffer -> the ops that read or write it. It is freed when the last of them has run.
    nbytes: buffer -> bytes.
    stays: buffers that are never freed.
    workspace: op -> bytes that it needs for itself while it runs.
    resident_nbytes: bytes that are in memory all the time.
    """

    before: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    workspace: tuple[int, ...]
    stays: frozenset[int] = frozenset()
    resident_nbytes: int = 0

    def __post_init__(self) -> None:
        n, m = len(self.before), len(self.makers)
        if len(self.workspace) != n or len(self.users) != m or len(self.nbytes) != m:
            raise OrderingError(
                f"{n} ops have {len(self.workspace)} workspaces, and {m} buffers {len(self.users)} sets of users and "
                f"{len(self.nbytes)} sizes; give one of each"
            )
        for op, ops in enumerate(self.before):
            if any(not 0 <= other < op for other in ops):
                raise OrderingError(f"op {op} must run after {ops}: number the ops in an order that is valid")
        for buffer, (maker, users) in enumerate(zip(self.makers, self.users, strict=True)):
            if not BEFORE <= maker < n or any(not 0 <= user < n for user in users):
                raise OrderingError(f"buffer {buffer} is made by {maker} and used by {users}; give ops below {n}")
            if any(user < maker for user in users):
                raise OrderingError(f"buffer {buffer} is used by {users} before {maker} makes it; give users from its maker on")
            if maker == BEFORE and not users and buffer not in self.stays:
                raise OrderingError(f"buffer {buffer} is in memory when the step begins and is used by no op; leave it out")
            if self.nbytes[buffer] < 0:
                raise OrderingError(f"buffer {buffer} has {self.nbytes[buffer]} bytes; give 0 or more")

    def __len__(self) -> int:
        return len(self.before)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the ops that must run after it."""
        ops: list[list[int]] = [[] for _ in self.before]
        for op, others in enumerate(self.before):
            for other in others:
                ops[other].append(op)
        return tuple(map(tuple, ops))

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the buffers that it allocates."""
        buffers: list[list[int]] = [[] for _ in self.before]
        for buffer, maker in enumerate(self.makers):
            if maker != BEFORE:
                buffers[maker].append(buffer)
        return tuple(map(tuple, buffers))

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the buffers that it uses."""
        buffers: list[list[int]] = [[] for _ in self.before]
        for buffer, users in enumerate(self.users):
            for user in users:
                buffers[user].append(buffer)
        return tuple(map(tuple, buffers))

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of every buffer, shape (buffers,)."""
        return np.array(self.nbytes, dtype=np.int64)

    @cached_property
    def flat_users(self) -> tuple[Ints, Ints]:
        """The users of all buffers in one array, one buffer after the other, and the index at which each buffer begins. Makers
        count as users.
        """
        lists = [users if maker == BEFORE else (maker, *users) for maker, users in zip(self.makers, self.users, strict=True)]
        lists = [users or (0,) for users in lists]  # a buffer that stays and that no op uses
        starts = np.cumsum([0, *map(len, lists)])[:-1]
        return np.array([user for users in lists for user in users], dtype=np.int64), starts.astype(np.int64)

    def lifetimes(self, sequence: Sequence[int]) -> tuple[Ints, Ints]:
        """First and last position of every buffer, both shape (buffers,). It is in memory at both."""
        n = len(self)
        position = np.empty(n + 1, dtype=np.int64)
        position[np.asarray(sequence, dtype=np.int64)] = np.arange(n)
        position[BEFORE] = 0
        if not self.makers:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        flat, starts = self.flat_users
        last = np.maximum.reduceat(position[flat], starts)
        last[list(self.stays)] = n - 1
        return position[np.array(self.makers, dtype=np.int64)], last

    def levels_nbytes(self, sequence: Sequence[int]) -> Ints:
        """Bytes in memory while each op of the sequence runs, shape (ops,): its own buffers, and all that are still needed."""
        first, last = self.lifetimes(sequence)
        steps = np.zeros(len(self) + 1, dtype=np.int64)
        np.add.at(steps, first, self.sizes)
        np.subtract.at(steps, last + 1, self.sizes)
        workspace = np.array(self.workspace, dtype=np.int64)[np.asarray(sequence, dtype=np.int64)]
        levels: Ints = np.cumsum(steps)[:-1] + workspace + self.resident_nbytes
        return levels

    def peak_nbytes(self, sequence: Sequence[int]) -> int:
        """The most bytes in memory at one op of the sequence."""
        return int(self.levels_nbytes(sequence).max(initial=self.resident_nbytes))
