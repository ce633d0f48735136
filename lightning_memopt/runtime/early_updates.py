"""Updates in backward: the user's one optimizer, stepped parameter by parameter as soon as a gradient is final (OLLA's early
weight updates: Steiner et al., 2022, section 4.3).

A hook on each parameter, called when backward has accumulated its gradient, steps the optimizer with groups that hold that
parameter alone, and frees the gradient. There is no second optimizer: learning rate, state and schedulers are the user's, and
are read as they are then. `Optimizer.step`, called later, finds no gradient and updates nothing; its hooks and those of
schedulers are called once. Which parameters, and when that is exact, is decided elsewhere (session/early_updates.py).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import optim

from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.record import uncompiled
from lightning_memopt.runtime.gradients import Told, reads_of_gradients
from lightning_memopt.torch_private import backward_keeps_graph

ALLOWED: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.NAdam,
    optim.RAdam,
    optim.Adafactor,
    optim.Muon,
)
"""Exactly these: they update each parameter by itself, and write to its own state alone. Subclasses may do more."""


class Reason(NamedTuple):
    """Why parameters cannot be updated in backward, and what to do about it."""

    what: str
    fix: str


REDUCED = Reason("gradients are reduced over several processes after the hooks", "Train in one process")


def refusal(reason: Reason) -> UpdatesInBackwardError:
    return UpdatesInBackwardError(
        f"optimizer_in_backward='always' would be wrong: {reason.what}. {reason.fix}, or set optimizer_in_backward='never'."
    )


def count_versions(optimizer: optim.Optimizer) -> None:
    """After its step: fused kernels count no versions, by which rebuilds see that a weight is not what it was."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version([p for p in group["params"] if p.grad is not None])


Options = list[dict[str, tuple[Any, int]]]
"""What each group of an optimizer says, with the version of what is a tensor."""


def _options_of(optimizer: optim.Optimizer) -> Options:
    versions = lambda v: v._version if isinstance(v, torch.Tensor) else 0  # noqa: E731
    return [{k: (v, versions(v)) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _same(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    return a[1] == b[1] and (a[0] is b[0] or (not isinstance(a[0], torch.Tensor) and bool(a[0] == b[0])))


def of_optimizers(optimizers: Sequence[optim.Optimizer]) -> list[Reason]:
    """What about the optimizers forbids it."""
    if len(optimizers) != 1:
        return [Reason(f"there are {len(optimizers)} optimizers, and one is stepped in backward", "Use one optimizer")]
    (optimizer,) = optimizers
    names = ", ".join(cls.__name__ for cls in ALLOWED)
    if type(optimizer) not in ALLOWED:
        what = f"{type(optimizer).__name__} is not known to update each parameter by itself"
        return [Reason(what, f"Use one of {names}, exactly, not a subclass")]
    found = []
    raw = getattr(type(optimizer).step, "__wrapped__", None)
    own = vars(optimizer).get("step")
    scheduled = own is None or getattr(own, "_wrapped_by_lr_sched", False)
    if not getattr(raw, "__module__", "").startswith("torch.optim") or not scheduled:
        found.append(Reason(f"the step of {type(optimizer).__name__} was replaced", "Leave it as torch has it"))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        found.append(Reason("the optimizer is differentiable", "Set differentiable=False"))
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        found.append(Reason("a GradScaler scales the gradients of this optimizer", "Train in bf16 or fp32"))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if len({id(p) for p in params}) < len(params):
        found.append(Reason("a parameter is in its group twice, and stepped twice", "Give each parameter once"))
    if any(type(p.data).__name__ == "DTensor" for p in params):
        found.append(Reason("parameters are distributed tensors", "Train on one device"))
    if several_processes():
        found.append(REDUCED)
    return found


def several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class EarlyUpdates:
    """Steps parameters of `optimizer` in the backward that runs in `backward`. Obeys.

    `updated`: the parameters, by identity, that this step has updated already. A gradient for one of those is refused: it can
    only come from a backward that should not have followed. `halfway`: how many there were when a step raised.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.updated: set[int] = set()
        self.halfway = 0
        self._raw: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without step hooks
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._groups: dict[int, dict[str, Any]] = {}
        self._options: Options = []
        self._final: Callable[[torch.Tensor], contextlib.AbstractContextManager[None] | None] | None = None
        self._reading = contextlib.ExitStack()

    @contextlib.contextmanager
    def backward(
        self, final: Callable[[torch.Tensor], contextlib.AbstractContextManager[None] | None], read: Told
    ) -> Iterator[None]:
        """Around the last backward before the optimizer's step.

        `final(p)` is told that the gradient of `p` is there; where it answers with a context, `p` is updated in it. `read(p)`
        is told that somebody reads the gradient of `p` after this backward and before the step, where `p` is not updated yet.
        """
        self.step_ended()
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self._options = _options_of(self.optimizer)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        # now, not once and for all: after hooks of the user's, which see the gradient; and never on a model that is copied
        self._handles = [p.register_post_accumulate_grad_hook(self._hook) for p in params if p.requires_grad and p.is_leaf]
        self._final = final
        try:
            yield
        except BaseException:
            if self.updated:
                warnings.warn(
                    f"MemOpt: backward raised after {len(self.updated)} of {len(params)} parameters had been updated in it. "
                    "The model is in the middle of a step: restore a checkpoint before training goes on.",
                    stacklevel=2,
                )
            self.given_up()
            raise
        finally:
            self._final = None
        self._reading.enter_context(reads_of_gradients(partial(self._read, read)))

    def _read(self, read: Told, p: torch.Tensor) -> None:
        if id(p) not in self.updated:
            read(p)
            return
        count = len(self.updated)
        self.step_ended()
        raise UpdatesInBackwardError(
            f"The gradient of a parameter of size {list(p.shape)} is read between backward and optimizer.step(), but {count} "
            "parameters were updated in backward already, because no gradient was read in the first steps: this step cannot be "
            "put right. Clip or log gradients from the first step on: then updates are left to optimizer.step(). Or set "
            "optimizer_in_backward='never'."
        )

    def stop_reading(self) -> None:
        """Whoever reads gradients from now on may."""
        self._reading.close()

    def options_changed(self) -> bool:
        """Whether groups that there were when the last backward began say something else now (a learning rate)."""
        groups = zip(self._options, _options_of(self.optimizer), strict=False)
        return any(a.keys() != b.keys() or not all(_same(a[k], b[k]) for k in a) for a, b in groups)

    def given(self) -> bool:
        """Whether a parameter that was updated has a gradient again, which no backward made."""
        return any(id(p) in self.updated and p.grad is not None for g in self.optimizer.param_groups for p in g["params"])

    def given_up(self) -> None:
        """The step will not end: what was updated stays updated."""
        self.halfway = self.halfway or len(self.updated)
        self.step_ended()

    def step_ended(self) -> None:
        """The optimizer has stepped: nothing is left on the parameters."""
        self.stop_reading()
        while self._handles:
            self._handles.pop().remove()
        self.updated.clear()
        self._groups, self._options = {}, []

    @uncompiled
    def _hook(self, p: torch.Tensor) -> None:
        with self._lock:
            if id(p) in self.updated:
                p.grad = None  # whoever catches this must not step it a second time
                raise UpdatesInBackwardError(
                    f"A parameter of size {list(p.shape)} that was updated in this backward gets another gradient: "
                    f"{len(self.updated)} parameters are updated already, so this step cannot be put right. Mark only the last "
                    "backward before optimizer.step(), and use checkpoint(use_reentrant=False) around tied weights; or set "
                    "optimizer_in_backward='never'."
                )
            context = self._final(p) if self._final is not None else None
            again = torch.is_grad_enabled() or backward_keeps_graph()
            if context is None or p.grad is None or again:
                return  # a hook of the user's took it; or, with create_graph or retain_graph, another backward may follow
            with context:
                self._update(p)

    def _update(self, p: torch.Tensor) -> None:
        optimizer, groups, version = self.optimizer, self.optimizer.param_groups, p._version
        self.updated.add(id(p))
        try:
            optimizer.param_groups = [{**self._groups[id(p)], "params": [p]}]
            self._raw(optimizer)
        finally:
            optimizer.param_groups = groups
        if p._version == version:  # fused kernels count no versions, and what was saved of it must be seen to have changed
            torch.autograd.graph.increment_version(p)
        p.grad = None
