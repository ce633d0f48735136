"""Record a training step without computing it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.config import ONLY_OBSERVED, EarlyUpdating, MemOptConfig
from lightning_memopt.device.determinism import varies
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.autocast import cuda_autocast
from lightning_memopt.fitting.checkpointing import CHECKPOINTED, kept, refuse_none, same_random_numbers, taken_off, turned_on
from lightning_memopt.fitting.operators import CudaOperators, Reads, count_on_host, update_together
from lightning_memopt.fitting.resting import Resting
from lightning_memopt.fitting.sharding import UnfilledRank, of_a_card, one_rank_of
from lightning_memopt.fitting.tiling import InTiles
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.fitting.values import Values
from lightning_memopt.fitting.workspaces import on_host, workspace_nbytes
from lightning_memopt.graph import OUTSIDE, Graph, Op, Tensor
from lightning_memopt.integrations.asking import STEPS
from lightning_memopt.plan.side_streams import with_pools
from lightning_memopt.units import divided

if TYPE_CHECKING:
    from lightning_memopt.bench.subject import Training
    from lightning_memopt.integrations.plain import Run

_AS_USUAL = "MemOpt: parameters are updated after backward, as usual: "
"""How a line of a run begins that says why no parameter is updated in backward (`session/early_updates.py`)."""
_COUNTER_NBYTES = 4
"""Bytes of the number of steps that an optimizer of torch keeps for each parameter."""
_PROCESS_NBYTES = 4096
"""Maximum number of bytes outside of the step that are taken to be the process's own: constants that libraries made once."""


@dataclass(frozen=True)
class Recorded:
    """A step that was recorded without being computed.

    graph: the step.
    assumed: op that returns a number to Python -> how often the number was assumed.
    ran: op without a kernel for the `meta` device -> how often it ran for real.
    as_usual: why no parameter was updated in backward; "" if nobody asked for that, or if some were.
    resting: what rests in the training, and may be parked; None if it was not looked for.
    """

    graph: Graph
    assumed: Counter[str]
    ran: Counter[str]
    as_usual: str = ""
    resting: Resting | None = None


@dataclass(frozen=True)
class Observed:
    """What observing a few steps gave.

    graph: the last step; None if it could not be recorded.
    said: why there is none.
    host_nbytes: bytes of this process during that step that would not be on the card.
    as_usual, resting: see `Recorded`.
    """

    graph: Graph | None
    said: str
    host_nbytes: int
    as_usual: str = ""
    resting: Resting | None = None


Observe = Callable[[Unfilled], Observed]
"""Runs steps, and observes them."""


def observing(early: bool = False, tiled: bool = False) -> MemOptConfig:
    """The options of a run that observes steps, and plans none. `early`: parameters are updated in backward. `tiled`: loss
    heads run in tiles.
    """
    in_backward: EarlyUpdating = "auto" if early else "never"
    return MemOptConfig(
        budget="min",
        profile_steps=ONLY_OBSERVED,
        verify=False,
        verbose=False,
        optimizer_in_backward=in_backward,
        tile="exact" if tiled else "off",
    )


def _counted_on_host(graph: Graph) -> Graph:
    """The graph, in which the host has the number of an optimizer's steps, and the number that is added to it."""
    added = {t for op in graph.ops if op.phase == "update" and op.name == "aten::lift_fresh" for t in op.inputs}
    on_host = [t.nbytes == _COUNTER_NBYTES and (t.kind == "optimizer_state" or t.id in added) for t in graph.tensors]
    return replace(
        graph, tensors=tuple(replace(t, nbytes=0) if is_ else t for t, is_ in zip(graph.tensors, on_host, strict=True))
    )


@contextlib.contextmanager
def marked(run: Run) -> Iterator[None]:
    """Within, each backward is the last one before an update, as a loop says it by `run.last_backward`. In other threads, and
    while a forward begins, this package measures something.
    """
    backward, thread = torch.autograd.backward, threading.get_ident()
    inside = False

    def last(*args: Any, **kwargs: Any) -> None:
        nonlocal inside
        if inside or run.session.rounds.inside or threading.get_ident() != thread:
            return backward(*args, **kwargs)
        inside = True
        try:
            with run.last_backward():
                backward(*args, **kwargs)
        finally:
            inside = False

    with mock.patch.object(torch.autograd, "backward", last):
        yield


class Watching:
    """A run that observes the steps of a model, from now until `close`.

    mode: is on, and is told if checkpointing is taken off. early, checkpoints, tiles: see `record`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        mode: Unfilled,
        early: bool = False,
        checkpoints: bool = False,
        tiles: InTiles | None = None,
    ) -> None:
        from lightning_memopt.integrations.plain import open_run

        self._lines: list[str] = []
        with contextlib.ExitStack() as stack:
            if checkpoints:
                stack.enter_context(turned_on(model))
            with contextlib.nullcontext() if tiles is None else tiles.assumed(mode):
                self._run = open_run(model, optimizers, observing(early, tiles is not None), self._lines.append)
            stack.callback(self._run.close)
            if self._run.checkpointing is not None:
                if checkpoints:
                    self._run.checkpointing.restore()
                elif self._run.checkpointing.layers:
                    mode.assumed.update([CHECKPOINTED])
            if early:
                stack.enter_context(marked(self._run))
            self._stack = stack.pop_all()

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """See `session.naming`."""
        return self._run.naming()

    def observed(self, host_nbytes: int, cuda: bool) -> Observed:
        """The last step, and why there is none. `cuda`: as on a CUDA device."""
        status = self._run.status()  # a step of another size, as the last batch of an epoch is, begins the observation anew
        graph = status.graph if status.plan is not None else self._run.session.observed_graph
        if cuda and graph is not None and count_on_host(self._run.session.optimizers):
            graph = _counted_on_host(graph)
        reasons = [line.removeprefix(_AS_USUAL) for line in self._lines if line.startswith(_AS_USUAL)]
        resting = None if graph is None else Resting.of(self._run.session, graph)
        return Observed(graph, f"{status.reason} {status.remedy}".strip(), host_nbytes, "".join(reasons[-1:]), resting)

    def close(self) -> None:
        """From now on the model trains plainly. May be called again."""
        self._stack.close()


def record(
    build: Callable[[], Training],
    cuda: bool = False,
    ranks: int = 1,
    values: Values | None = None,
    early: bool = False,
    checkpoints: bool = False,
    tiles: InTiles | None = None,
) -> Recorded:
    """Record a step of the training that `build` makes. No bytes of it are computed, those of its weights included.

    cuda: the step has the operators that torch would choose on a CUDA device.
    ranks: number of processes, of which this one is the first; `build` shards the model over them.
    values: gives values that steer the steps.
    early: parameters are updated in backward, as far as the step allows it.
    checkpoints: gradient checkpointing stays, or is turned on in a model of transformers. Otherwise it is taken off.
    tiles: the loss head runs in these.

    Raises ConfigError if the steps have no forward in training, backward and update, or nothing that is checkpointed although
    it should be.
    """
    with contextlib.closing(AtSizes(build, lambda training: training, cuda, ranks, values)) as sizes:
        return sizes.record(early=early, checkpoints=checkpoints, tiles=tiles)


Made = TypeVar("Made")


class AtSizes(Generic[Made]):
    """A training whose step is recorded at several sizes. Its model, and the state of its optimizer, are made once.

    make: makes what stays at all sizes. at: makes of it the training at a size. The others: see `record`.
    """

    def __init__(
        self, make: Callable[[], Made], at: Callable[..., Training], cuda: bool, ranks: int = 1, values: Values | None = None
    ) -> None:
        self._make = make
        self._at = at
        self._cuda = cuda
        self._ranks = ranks
        self._mode = Unfilled(values) if ranks == 1 else UnfilledRank(values)
        self._group = contextlib.ExitStack()
        self._made: Made | None = None
        self._before_nbytes = 0

    def record(self, *sizes: int, early: bool = False, checkpoints: bool = False, tiles: InTiles | None = None) -> Recorded:
        """Record a step at these sizes. Raises ConfigError as the function does."""
        if self._ranks > 1 and self._made is None:
            self._group.enter_context(one_rank_of(self._ranks))
        made = recorded(
            lambda mode: self._observed(mode, sizes, early, checkpoints, tiles),
            self._cuda,
            mode=self._mode,
            checkpoints=checkpoints,
        )
        if self._ranks == 1:
            return made
        graph = of_a_card(made.graph)
        return replace(made, graph=with_pools(graph) if self._cuda else graph)

    def close(self) -> None:
        """Let go of what was made."""
        self._made = None
        self._mode.close()
        self._group.close()

    def _observed(
        self, mode: Unfilled, sizes: tuple[int, ...], early: bool, checkpoints: bool, tiles: InTiles | None
    ) -> Observed:
        """A step like those that follow."""
        steps = STEPS if early else 1  # with early updates, a step ends when the next one begins
        if self._made is None:
            self._before_nbytes, steps = mode.host_nbytes, STEPS
            self._made = self._make()
        training = self._at(self._made, *sizes)
        optimizers = [training.optimizer] if isinstance(training.optimizer, Optimizer) else list(training.optimizer)
        if self._cuda:
            update_together(optimizers)
        watching = Watching(training.model, optimizers, mode, early, checkpoints, tiles)
        with contextlib.closing(watching), watching.naming():
            for _ in range(steps):
                training.step()
            return watching.observed(self._before_nbytes, self._cuda)


def recorded(
    observe: Observe, cuda: bool = False, values: Values | None = None, mode: Unfilled | None = None, checkpoints: bool = False
) -> Recorded:
    """`record` for what runs its steps, and is observed, by itself.

    mode: one in which the training was made, with its values, and which the caller closes.
    """
    if mode is None:
        with contextlib.closing(Unfilled(values)) as mode:
            return recorded(observe, cuda, mode=mode, checkpoints=checkpoints)
    operators = partial(CudaOperators if cuda else Reads, mode)
    seen: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(same_random_numbers())
        stack.enter_context(mode)
        stack.enter_context(operators())
        if cuda:
            stack.enter_context(cuda_autocast())
        if checkpoints:
            stack.enter_context(kept(lambda: seen.update([CHECKPOINTED]), operators, cuda))
        elif cuda:
            stack.enter_context(taken_off(lambda: mode.assumed.update([CHECKPOINTED])))
        observed = observe(mode)
    if checkpoints:
        refuse_none(seen[CHECKPOINTED])
    if observed.graph is None:
        raise ConfigError(
            "the step cannot be planned: it must run a forward of the model in training, its backward, and optimizer.step(). "
            f"{observed.said}"
        )
    graph = _without(observed.graph, observed.host_nbytes)
    on_device = _on_cuda(graph) if cuda else graph
    return Recorded(on_device, Counter(mode.assumed), Counter(mode.ran), observed.as_usual, observed.resting)


def _without(graph: Graph, host_nbytes: int) -> Graph:
    """The graph without memory of this process that would not be on the card, and without seconds: its ops did not run."""

    def own(t: Tensor) -> Tensor:
        if t.name != OUTSIDE:
            return t
        nbytes = t.nbytes - host_nbytes
        return replace(t, nbytes=nbytes if nbytes > _PROCESS_NBYTES else 0)

    ops = tuple(replace(op, seconds=0.0) for op in graph.ops)
    return replace(graph, tensors=tuple(map(own, graph.tensors)), ops=ops)


def _on_cuda(graph: Graph) -> Graph:
    """The graph as one of a CUDA device, whose allocator gives whole blocks, and reserves more than it gives, and on which some
    ops do not give the same bits twice.
    """
    blocks = kind_of("cuda").allocated_nbytes
    host = on_host(graph)
    tensors = tuple(replace(t, nbytes=0 if t.id in host else blocks(t.nbytes)) for t in graph.tensors)
    ops = tuple(
        replace(
            op,
            workspace_nbytes=workspace_nbytes(graph, op),
            recomputable=op.recomputable and not varies(op.name, "cuda"),
        )
        for op in graph.ops
    )
    graph = replace(graph, tensors=tensors, ops=ops, device="cuda")
    updates = (op for op in graph.ops if op.phase == "update" and op.workspace_nbytes)
    return replace(graph, asked={op.id: _requests(graph, op) for op in updates})


def _requests(graph: Graph, op: Op) -> tuple[int, ...]:
    """The requests of an update's workspace: optimizers that update all parameters together make a temporary of the size of
    each of them.
    """
    asked = divided(op.workspace_nbytes, [t.nbytes for t in graph.tensors if t.kind == "gradient" and t.nbytes])
    return *asked, *(-1 - i for i in range(len(asked)))
