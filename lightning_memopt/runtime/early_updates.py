"""Early updates: the optimizer steps each parameter in backward, as soon as its gradient is final (Steiner et al., *OLLA*,
2022, section 4.3).

Each parameter has a hook that autograd calls when it has accumulated the parameter's gradient. The hook steps the optimizer
with a group of this parameter alone, and frees the gradient. The optimizer is the user's own, with its current learning rate
and state. `Optimizer.step`, which the user calls later, finds no gradients and updates nothing; its hooks and those of
schedulers are called once, by that call. session/early_updates.py decides which parameters are updated early, and in which
steps this is done.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.record import Seams, is_registered, parameters_of, uncompiled
from lightning_memopt.runtime.between import Between, Snapshot, Touched
from lightning_memopt.runtime.gradients import Told, reads_of_gradients
from lightning_memopt.runtime.reduced import Reduced
from lightning_memopt.torch_private import backward_keeps_graph, gradient_of, remove_accumulation_hook

Completed = Callable[[torch.Tensor], contextlib.AbstractContextManager[None] | None]
"""Called with a parameter whose gradient is complete. Returns the context of its update, or None."""

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
"""These classes update each parameter by itself, and write to its own state alone. Subclasses, which may do more, are refused
unless they are registered (`register_optimizer`).
"""


class Reason(NamedTuple):
    """Why no parameter can be updated early.

    what: the reason.
    fix: what the user can do about it.
    """

    what: str
    fix: str


def refusal(reason: Reason) -> UpdatesInBackwardError:
    """The error for a user who asked for early updates that would give wrong results."""
    return UpdatesInBackwardError(
        f"optimizer_in_backward='always' would be wrong: {reason.what}. {reason.fix}, or set optimizer_in_backward='never'."
    )


def count_versions(optimizer: optim.Optimizer) -> None:
    """Increment the version counters of the weights that the optimizer has just updated: fused kernels do not.

    Rebuilds detect changed weights by these counters.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version([p for p in group["params"] if gradient_of(p) is not None])


Options = list[dict[str, tuple[Any, int]]]
"""For each group of an optimizer: option -> (value, version counter of the value; 0 if the value is not a tensor)."""


def options_of(optimizer: optim.Optimizer) -> Options:
    """The options of its groups as they are now."""

    def version_of(value: Any) -> int:
        return value._version if isinstance(value, torch.Tensor) else 0

    return [
        {option: (value, version_of(value)) for option, value in group.items() if option != "params"}
        for group in optimizer.param_groups
    ]


def _same(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    """Whether two entries of `Options` are the same value; tensors are compared by identity and version."""
    (old, old_version), (new, new_version) = a, b
    if old_version != new_version:
        return False
    return old is new or (not isinstance(old, torch.Tensor) and bool(old == new))


_HOOKED = optim.Optimizer.profile_hook_step(lambda _: None).__code__


def step_without_hooks(kind: type[optim.Optimizer]) -> Callable[..., Any] | None:
    """The `step` of a class without the wrapper in which torch calls step hooks; None if it has no such wrapper.

    Torch wraps it when the first optimizer of the class is made, and more than once if threads make optimizers together.
    """
    step: Any = kind.step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return None if step is kind.step else step


def of_step(optimizer: optim.Optimizer, allowed: tuple[type[optim.Optimizer], ...]) -> list[Reason]:
    """The reasons why parameters of an optimizer cannot be stepped one by one. `allowed`: the classes for which they can, in
    addition to registered ones.
    """
    registered = is_registered(optimizer)
    if type(optimizer) not in allowed and not registered:
        names = ", ".join(cls.__name__ for cls in allowed)
        what = f"{type(optimizer).__name__} is not known to update each parameter by itself"
        return [Reason(what, f"Use one of {names}, exactly, not a subclass, or say that yours does: register_optimizer(...)")]
    reasons = []
    raw = step_without_hooks(type(optimizer))
    own = vars(optimizer).get("step")
    replaced = own is not None and not getattr(own, "_wrapped_by_lr_sched", False)  # schedulers of torch wrap it
    if replaced or not (registered or getattr(raw, "__module__", "").startswith("torch.optim")):
        reasons.append(Reason(f"the step of {type(optimizer).__name__} was replaced", "Leave it as torch has it"))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        reasons.append(Reason("the optimizer is differentiable", "Set differentiable=False"))
    params = parameters_of(optimizer)
    if len({id(p) for p in params}) < len(params):
        reasons.append(Reason("a parameter is in its group twice, and stepped twice", "Give each parameter once"))
    return reasons


def of_optimizers(optimizers: Sequence[optim.Optimizer]) -> list[Reason]:
    """The reasons why no parameter of these optimizers can be updated early."""
    if len(optimizers) != 1:
        return [Reason(f"there are {len(optimizers)} optimizers, and one is stepped in backward", "Use one optimizer")]
    (optimizer,) = optimizers
    reasons = of_step(optimizer, ALLOWED)
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        reasons.append(Reason("a GradScaler scales the gradients of this optimizer", "Train in bf16 or fp32"))
    return reasons


class EarlyUpdates:
    """Updates parameters of `optimizer` in backward, within the context `backward`.

    optimizer: the user's optimizer.
    updated: identities of the parameters that this step has updated already. A second gradient for such a parameter is an
        error: it comes from a backward that should not have followed.
    halfway: number of parameters that had been updated when a step raised an error; 0 if no step has.
    loaded: whether a checkpoint was loaded into the optimizer after these updates.
    over: whether no optimizer step is expected: it has come (a hook may have raised in it), or a checkpoint was loaded.
    freed: identities of the parameters whose gradients were freed in backward, and not zeroed since.
    cleared: whether gradients were zeroed since the last step.
    kept: whether gradients were set to zero in place, so that they still exist in the next step.
    around: called with a parameter: the context of its update.
    written: whether weights or state of these parameters were written after their updates. It is an error only if a step
        follows: a checkpoint may be loaded instead, first into the model.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.updated: set[int] = set()
        self.halfway = 0
        self.loaded = self.over = self.written = False
        self.freed: set[int] = set()
        self.cleared = self.kept = False
        self.around: Callable[[torch.Tensor], contextlib.AbstractContextManager[None]] = lambda p: contextlib.nullcontext()
        self._between, self._before_step = Between(), Snapshot(optimizer, ())
        self._raw = step_without_hooks(type(optimizer)) or type(optimizer).step
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._hooked: list[torch.Tensor] = []
        self._groups: dict[int, dict[str, Any]] = {}
        self._options: Options = []
        self._final: Completed | None = None
        self._reduced: frozenset[int] = frozenset()
        self._complete: set[int] = set()
        self._laid_out: dict[int, bool] = {}
        self._in_buckets: list[torch.Tensor] = []
        self._reading, self._zeroing = contextlib.ExitStack(), contextlib.ExitStack()
        self._listens = False

    @contextlib.contextmanager
    def backward(
        self,
        final: Completed,
        read: Told,
        touched: Touched,
        buckets: Reduced | None = None,
        reduced: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """A context for the last backward before the optimizer's step.

        `final(p)` is called when the gradient of `p` is complete. If it returns a context, `p` is updated within that context;
        if it returns None, `p` is not updated. `read(p)` is called when somebody reads the gradient of a `p` that was not
        updated, after this backward and before the step. `touched(p, writes)` is called in that time when an op reads or
        writes the weight or the state of any `p`, or a checkpoint is made of the state. `buckets`: reduces gradients over
        processes, after which they are complete. `reduced()` is called when all buckets are reduced.

        Raises UpdatesInBackwardError to code that reads the gradient of an updated parameter, and if an updated parameter gets
        another gradient.
        """
        self.step_ended()
        self._listen()
        self._final, self._complete = final, set()
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self._options = options_of(self.optimizer)
        params = parameters_of(self.optimizer)
        # registered in every step, to run after the user's hooks, which see the gradient; copies of the model do not get them
        self._hooked = [p for p in params if p.requires_grad and p.is_leaf]
        try:
            for p in self._hooked:
                p.register_post_accumulate_grad_hook(self._hook)
            self._handles.append(self.optimizer.register_load_state_dict_post_hook(self._loads))
            self._handles.append(self.optimizer.register_state_dict_pre_hook(partial(self._saves, touched)))
            with contextlib.nullcontext() if buckets is None else buckets.told(self.full, reduced):
                self._reduced = frozenset() if buckets is None else buckets.parameters()
                yield
        except BaseException as error:
            if self.updated:
                warnings.warn(
                    f"MemOpt: backward raised after {len(self.updated)} of {len(params)} parameters had been updated in it. "
                    "The model is in the middle of a step: restore a checkpoint before training goes on.",
                    stacklevel=2,
                )
                if "modified by an inplace operation" in str(error):  # autograd does not say what modified it
                    warnings.warn(
                        "MemOpt: the tensor that was modified may be a weight that was updated in this backward, and that a "
                        "branch of the loss outside of the model's forward still needed. Make that branch in the first steps, "
                        "too, or set optimizer_in_backward='never'.",
                        stacklevel=2,
                    )
            self.given_up()
            raise
        finally:
            self._final, self._reduced = None, frozenset()
            while self._in_buckets:  # not earlier: when backward ends, the wrapper copies the buckets into these gradients
                self._in_buckets.pop().grad = None
        self._reading.enter_context(reads_of_gradients(partial(self._read, read)))
        self._before_step = Snapshot(self.optimizer, [p for p in params if id(p) in self.updated or not self.updated])
        self._between.begin(self.optimizer, touched)

    def _read(self, read: Told, p: torch.Tensor) -> None:
        if id(p) not in self.updated:
            read(p)
            return
        count = len(self.updated)
        self.step_ended()
        raise UpdatesInBackwardError(
            f"The gradient of a parameter of size {list(p.shape)} is read between backward and optimizer.step(), but {count} "
            "parameters were updated in backward already, because no gradient was read in the first steps: this step cannot be "
            "put right, but by a checkpoint. Clip, log or zero gradients there from the first step on: then updates are left "
            "to optimizer.step(). Or set optimizer_in_backward='never'."
        )

    def stop_reading(self) -> None:
        """From now on, code may read gradients, weights and state."""
        self._reading.close()
        self._between.end()

    def options_changed(self) -> bool:
        """Whether an option of a group (a learning rate) has changed since the last backward began. New groups do not count."""
        groups = zip(self._options, options_of(self.optimizer), strict=False)
        return any(a.keys() != b.keys() or not all(_same(a[k], b[k]) for k in a) for a, b in groups)

    def touched(self) -> bool:
        """Whether the weight or the state of an updated parameter has changed since the backward; if none was updated, of
        any parameter.
        """
        return self.written or self._before_step.changed()

    def given(self) -> bool:
        """Whether the user has set a gradient for a parameter that was updated."""
        return any(id(p) in self.updated and gradient_of(p) is not None for p in parameters_of(self.optimizer))

    def _listen(self) -> None:
        """Listen to `zero_grad` until the run ends, because it is called after the step."""
        if not self._listens:
            self._zeroing.enter_context(zeroed(self._zeroed))
            self._listens = True
        self.cleared = False

    def _zeroed(self, parameters: list[torch.Tensor], to_none: bool) -> None:
        """These gradients were zeroed. A gradient of zeros moves a parameter by its momentum, even in a step that does not use
        it. So if gradients are zeroed in place, those that were freed in backward are made anew as zeros.
        """
        ours = set(map(id, parameters_of(self.optimizer))).intersection(map(id, parameters))
        self.cleared = self.cleared or bool(ours)
        for p in parameters if not to_none else ():
            if id(p) in self.freed and p.grad is None:
                p.grad = torch.zeros_like(p)
                self.kept = True
        self.freed -= ours

    def given_up(self) -> None:
        """The step will not end. Updated parameters stay updated, and `halfway` says how many they are."""
        self.halfway = self.halfway or len(self.updated)
        self.step_ended()
        self.freed.clear()
        self._zeroing.close()
        self._listens = False

    def step_ended(self) -> None:
        """The optimizer has stepped: remove the hooks and forget the step."""
        self.stop_reading()
        while self._handles:
            self._handles.pop().remove()
        remove_accumulation_hook(self._hooked, self._hook)
        self._hooked = []
        if self.updated and not self.over:  # the step is given up, and so are its gradients
            self.freed.clear()
        self.updated.clear()
        self.loaded = self.over = self.written = False
        self._groups, self._options, self._before_step = {}, [], Snapshot(self.optimizer, ())

    def _loads(self, _: optim.Optimizer) -> None:
        """A checkpoint is loaded. (No hook can be removed here, because torch iterates over them.)"""
        self.stop_reading()
        self.loaded = self.over = bool(self.updated)

    def _saves(self, touched: Touched, _: optim.Optimizer) -> None:
        """A checkpoint of the state is made, which no op shows."""
        for p in parameters_of(self.optimizer) if self._between.on else ():
            touched(p, False)

    @uncompiled
    def _hook(self, p: torch.Tensor) -> None:
        with self._lock:
            if self.over:  # the next step has begun, with an unmarked backward
                self.updated.clear()
                self.loaded = self.over = False
            if id(p) in self.updated:
                p.grad = None  # code that catches the error must not step the parameter a second time
                raise UpdatesInBackwardError(
                    f"A parameter of size {list(p.shape)} that was updated in this backward gets another gradient: "
                    f"{len(self.updated)} parameters are updated already, so this step cannot be put right. Mark only the last "
                    "backward before optimizer.step(), and use checkpoint(use_reentrant=False) around tied weights; or set "
                    "optimizer_in_backward='never'."
                )
            may_follow = torch.is_grad_enabled() or backward_keeps_graph()  # another backward, by create_graph or retain_graph
            if id(p) in self._reduced:
                if not may_follow:
                    self._complete.add(id(p))
                return
            context = self._final(p) if self._final is not None else None
            if context is None or may_follow or p.grad is None:  # no gradient: a hook of the user took it
                return
            with context:
                self._update(p)
                p.grad = None

    def full(self, p: torch.Tensor, view: torch.Tensor) -> Callable[[], None] | None:
        """See `reduced.Full`. A parameter without a gradient here may have one on another rank, and is updated as usual."""
        if id(p) not in self._complete or self._final is None or p.grad is None:
            return None
        if id(p) not in self._laid_out:  # the strides of a parameter may have changed since it was wrapped
            self._laid_out[id(p)] = torch.allclose(view, p.grad, rtol=0.0, atol=0.0, equal_nan=True)
        if not self._laid_out[id(p)]:
            return None
        context = self._final(p)
        if context is None:
            return None
        p.grad = view  # frees the old gradient
        self._in_buckets.append(p)
        return partial(self._update_in, context, p)

    def _update_in(self, context: contextlib.AbstractContextManager[None], p: torch.Tensor) -> None:
        with self._lock, context:
            self._update(p)

    def _update(self, p: torch.Tensor) -> None:
        optimizer, groups, version = self.optimizer, self.optimizer.param_groups, p._version
        self.updated.add(id(p))
        self.freed.add(id(p))
        try:
            optimizer.param_groups = [{**self._groups[id(p)], "params": [p]}]
            with self.around(p):
                self._raw(optimizer)
        finally:
            optimizer.param_groups = groups
        if p._version == version:  # fused kernels do not move the counter that shows the change
            torch.autograd.graph.increment_version(p)


Zeroed = Callable[[list[torch.Tensor], bool], None]
"""Called with parameters, and with whether their gradients are None now (otherwise they were set to zero in place)."""


def _telling(original: Callable[..., Any], parameters: Callable[[Any], list[torch.Tensor]]) -> Callable[..., Any]:
    @functools.wraps(original)
    @uncompiled
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for told in tuple(_seams.listeners):
            told(parameters(self), set_to_none)

    return zero_grad


_seams: Seams[Zeroed] = Seams(
    lambda: [
        (optim.Optimizer, "zero_grad", lambda original: _telling(original, parameters_of)),
        (nn.Module, "zero_grad", lambda original: _telling(original, lambda module: list(module.parameters()))),
    ]
)


def zeroed(told: Zeroed) -> Any:
    """Within, call `told` after gradients were zeroed."""
    return _seams.listening(told)
