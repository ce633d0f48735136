"""Notice when code reads or writes weights, or the optimizer's state, between backward and the optimizer's step.

A dispatch mode sees the ops. `p.data` and `p.detach()` are ops, too, so it sees what begins with them: `state_dict()` of the
model, `p.detach().numpy()`. It does not see code that reads memory without an op: through an older alias, in another thread, or
in compiled code. If such code writes, or replaces tensors of the state, `Snapshot` shows that afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim

from lightning_memopt.record import Outside, is_plain, parameters_of, rule_of, storage_id, tensors_in, uncompiled, written_by
from lightning_memopt.record.tensors import conjugating, count_versions
from lightning_memopt.runtime.state_dicts import values_of
from lightning_memopt.torch_private import OpOverload, local_tensor

Touched = Callable[[torch.Tensor, bool], None]
"""Called with a parameter whose weight or state is read or written, and with whether it is only written."""


def _state_of(optimizer: optim.Optimizer, p: torch.Tensor) -> list[Any]:
    """The values of the parameter's state. Only looked up if there is one: a lookup in the table adds an entry."""
    return values_of(optimizer.state[p]) if p in optimizer.state else []


class Between(Outside):
    """The dispatch mode. It is entered beneath all others, because the user's modes may begin and end in any order.

    on: whether it reports what it sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: Touched | None = None
        self._watched: dict[int, torch.Tensor] = {}

    @property
    def on(self) -> bool:
        return self._told is not None

    def begin(self, optimizer: optim.Optimizer, told: Touched) -> None:
        """Backward is over: from now on call `told` before each op. Its exceptions are raised to the caller of the op."""
        self.end()
        for p in parameters_of(optimizer):
            for t in map(local_tensor, tensors_in([p, *_state_of(optimizer, p)])):
                if is_plain(t):
                    self._watched[storage_id(t)] = p
        self._told = told
        self.enter(beneath=True)

    def end(self) -> None:
        """Stop calling `told`. May be repeated: a mode cannot be left while it handles an op, and is then only switched off."""
        self._told = None
        self._watched.clear()
        self.leave()

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # `cond`, `scan`
            self._look([*args, *kwargs.values()], [])
            return func(*args, **kwargs)
        rule = rule_of(func)
        targets = written_by(func, rule, args, kwargs)
        if rule.handling != "empty":  # these read no bytes
            self._look([*args, *kwargs.values()], targets)
        before = [t._version for t in targets]
        out = (conjugating(func) if rule.conjugates else func._op)(*args, **kwargs)
        if targets and func._name.startswith("aten::_foreach_"):
            count_versions(targets, before)
        return out

    def _look(self, values: list[Any], targets: list[torch.Tensor]) -> None:
        written = set(map(id, targets))
        for t in tensors_in(values):
            local = local_tensor(t)
            p = self._watched.get(storage_id(local)) if is_plain(local) else None
            if p is not None and self._told is not None:
                self._told(p, id(t) in written)


class Snapshot:
    """The weights and the state of parameters at one moment: the addresses of their memory, and the version counters. It holds
    no tensor of the state.
    """

    def __init__(self, optimizer: optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._seen = [(p, *self._look(p)) for p in parameters]

    def _look(self, p: torch.Tensor) -> tuple[list[Any], list[tuple[int, int]]]:
        values = _state_of(self._optimizer, p)
        tensors = map(local_tensor, tensors_in([p, *values]))
        held = [weakref.ref(value) if isinstance(value, torch.Tensor) else value for value in values]
        return held, [(storage_id(t), t._version) for t in tensors if is_plain(t)]

    def changed(self) -> bool:
        """Whether any address or counter has changed since."""
        for p, values, versions in self._seen:
            now, versions_now = self._look(p)
            if versions != versions_now or len(now) != len(values) or any(a is not b for a, b in zip(now, values, strict=True)):
                return True
        return False
