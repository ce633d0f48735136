"""The planned pool of a session: which steps are logged or served from the arena, and the addresses that are solved."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import torch

from lightning_memopt import native
from lightning_memopt.config import MemOptConfig
from lightning_memopt.cxx import BuildError
from lightning_memopt.device.backends import current_stream
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.device.places import on_host
from lightning_memopt.logs import Say
from lightning_memopt.plan import Addresses
from lightning_memopt.runtime.pool import ALIGNMENT, LoggedStep, PoolStatus, PoolWindows, Solve, StreamWindows
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.solvers.placement import Buffer, place_cyclic
from lightning_memopt.units import format_nbytes

_SECONDS = 5.0
_LEAST_SECONDS = 0.1
"""Maximum and minimum seconds of a search for the addresses of one step."""
_open: weakref.WeakSet[Pooling] = weakref.WeakSet()
"""The session that has the pool of the process; none or one."""


class Pooling(Part):
    """The planned pool of one session. It does nothing unless `pool="planned"` asks for it and it is possible.

    A step begins with its first forward and ends where the next step begins. So what is freed after the update, or at the
    beginning of the next step (gradients, the loop's loss), has an address, too.
    """

    def __init__(self, config: MemOptConfig, device: torch.device, say: Say, parts: Parts) -> None:
        """`parts`: those of the session; it is one if it is wanted."""
        if config.pool is not None:
            parts.add(self)
        self._config, self._device, self._say = config, device, say
        self._windows: PoolWindows | StreamWindows | None = None
        self._reason: str | None = None

    def step_begins(self, state: object, limit_nbytes: int | None) -> None:
        if self._windows is None and self._reason is None:
            self._opens()
        if self._windows is None:
            return
        checked = self._config.verify and isinstance(state, Running) and state.verifies  # it requests more than later steps
        if isinstance(state, Running) and not checked:
            budget_nbytes = state.plan.budget_nbytes if limit_nbytes is None else limit_nbytes
            self._windows.begins(state, budget_nbytes, state.plan.addresses)
        else:
            self._windows.rests()

    def evaluates(self, within_step: bool) -> None:
        """A forward of evaluation begins. Within a step, its requests fall through, and the step goes on."""
        if not within_step:
            self.rests()

    def evaluation_begins(self) -> None:
        self.rests()

    def rests(self) -> None:
        """No training step runs until the next one begins."""
        if self._windows is not None:
            self._windows.rests()

    def _opens(self) -> None:
        if _open:
            self._reason = "another run has it"
        elif kind_of(self._device.type).has_segments:
            self._opens_cuda()
        elif not on_host(self._device):
            self._reason = f"the model is on {self._device}, and it serves the CPU and CUDA"
        else:
            pool = native.pool()
            if pool is None:
                self._reason = "the native allocator, which serves it, is not in place"
            else:
                self._windows = PoolWindows(pool, _Solver(self._config).saying(self._say), self._say, _decided)
        if self._windows is not None:
            _open.add(self)
        else:
            self._say(f"MemOpt: no planned pool: {self._reason}. Training goes on with the ordinary allocator.")

    def _opens_cuda(self) -> None:
        try:
            allocator = native.cuda_allocator(self._device, self._say)
            stream = current_stream(self._device)
            index = stream.device.index
            main = allocator.stream(index, stream.cuda_stream)
        except BuildError as error:
            self._reason = f"the model is on {self._device}, and {error}"
            return
        solver = _Solver(self._config, native.CUDA_ALIGNMENT, reserves=True).saying
        self._windows = StreamWindows(allocator, index, main, solver, self._say, _decided)

    def close(self) -> None:
        if self._windows is not None:
            self._windows.close()
        _open.discard(self)

    def status(self) -> PoolStatus | None:
        """None if no pool was asked for."""
        if self._windows is None:
            return None if self._reason is None else PoolStatus(reason=self._reason)
        return self._windows.status()


def _decided(key: object, addresses: Addresses) -> None:
    """A step has shown its requests: the plan in force has their addresses from now on."""
    if isinstance(key, Running):
        key.plan = replace(key.plan, addresses=addresses)


class _Solver:
    """Addresses for logged steps. All searches of a run together take at most `solver_seconds`.

    alignment: of the addresses, in bytes.
    reserves: whether reserved bytes count, as on CUDA. Then an arena counts with all its bytes from the beginning, sizes count
        rounded up, and buffers of the step before are still there. The CPU's counter counts requests alone.
    """

    def __init__(self, config: MemOptConfig, alignment: int = ALIGNMENT, reserves: bool = False) -> None:
        self._left_seconds, self._alignment, self._reserves = config.solver_seconds, alignment, reserves

    def saying(self, say: Say) -> Solve:
        """`solve`, and tell the user what was solved."""
        return partial(self.solve, say=say)

    def solve(self, step: LoggedStep, budget_nbytes: int, say: Say) -> Addresses | str:
        """Addresses for a step; the reason, where the arena would break the budget."""
        buffers = [Buffer(str(number), number, until, nbytes) for number, until, nbytes in step.requests]
        seconds = max(_LEAST_SECONDS, min(_SECONDS, self._left_seconds / 2))
        placement = place_cyclic(buffers, step.period, seconds, self._alignment)
        self._left_seconds -= placement.seconds
        offsets: list[int | None] = [None] * step.period
        until = [0] * step.period
        for request, offset in zip(step.requests, placement.offsets, strict=True):
            offsets[request.number], until[request.number] = offset, request.until
        beside_nbytes = step.beside_nbytes + (step.crossing_nbytes if self._reserves else 0)
        needed = placement.height_nbytes + beside_nbytes - (0 if self._reserves else step.rounding_nbytes)
        addresses = Addresses(
            nbytes=step.nbytes,
            offsets=tuple(offsets),
            until=tuple(until),
            arena_nbytes=placement.height_nbytes,
            max_live_nbytes=placement.bound_nbytes,
            needed_nbytes=max(0, needed),
        )
        if needed > budget_nbytes:
            return (
                f"an arena of {format_nbytes(addresses.arena_nbytes)} beside {format_nbytes(beside_nbytes)} of other "
                f"memory is above the budget of {format_nbytes(budget_nbytes)} (budget={needed} has room for it)"
            )
        say(
            f"MemOpt: planned pool in force: {addresses.planned} of {step.period} requests of a step have an address, arena "
            f"{format_nbytes(addresses.arena_nbytes)}, max-live {format_nbytes(addresses.max_live_nbytes)}, fragmentation "
            f"{100 * addresses.fragmentation:.2f} %; solved in {placement.seconds:.1f} s"
        )
        return addresses
