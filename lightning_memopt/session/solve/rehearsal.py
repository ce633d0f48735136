"""Predict the bytes of an optimizer's update before anything is updated: its state, and its temporary tensors.

A throw-away optimizer of the same class and options steps throw-away parameters of the same sizes on torch's `meta` device,
where tensors have a size and no memory. The rehearsal reads only sizes and options of the user's objects, writes to none of
them, and does not reach the user's hooks, random numbers and modes. Only torch's own optimizers are rehearsed, and registered
ones: the step of another one may do anything (print, count, talk to other processes).
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import optim

from lightning_memopt.device.places import has_memory, is_on, on_host
from lightning_memopt.record import Outside, double_of, is_registered, rule_of
from lightning_memopt.runtime.early_updates import step_without_hooks
from lightning_memopt.runtime.state_dicts import as_it_is
from lightning_memopt.session.observe.graphs import pieces
from lightning_memopt.session.solve.registered import RegisteredStep, refusal
from lightning_memopt.torch_private import (
    gradient_of,
    local_tensor,
    no_torch_functions,
    tree_leaves,
    tree_map_only,
    without_modes,
)

_LATER = 1000
"""The number of the last rehearsed step: some optimizers (RAdam) work differently in their first steps."""
SCALARS_NBYTES = 64
"""Bytes of temporary scalar tensors that kernels make where no dispatch mode sees them."""

Rounded = Callable[[int], int]
"""Rounds a request in bytes as the allocator of the device does."""


class Update(NamedTuple):
    """Bytes that updates take.

    state: those of each tensor of optimizer state that the updates make and keep.
    beside: those of each block that an update has, when it has most, beside parameters, gradients and all of the state, in
        the first step or a later one. An allocator serves many small requests from memory that one large request cannot use.
    throughout_nbytes: bytes held in the whole step, because forward and backward run inside of the update.
    known: False where an update may take more than that.
    """

    state: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    throughout_nbytes: int = 0
    known: bool = True

    @property
    def state_nbytes(self) -> int:
        return sum(self.state)

    @property
    def beside_nbytes(self) -> int:
        return sum(self.beside)

    def then(self, other: Update) -> Update:
        """This update and another one after it."""
        return Update(
            self.state + other.state,
            max(self.beside, other.beside, key=sum),
            max(self.throughout_nbytes, other.throughout_nbytes),
            self.known and other.known,
        )


UNKNOWN = Update(known=False)
Group = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""Options of a parameter group, and those of its parameters that are updated."""


def with_gradients(optimizer: optim.Optimizer) -> list[Group]:
    """The groups of this optimizer, with the parameters that have a gradient now."""
    return [(group, [p for p in group["params"] if gradient_of(p) is not None]) for group in optimizer.param_groups]


def still_to_make(optimizer: optim.Optimizer, device: torch.device, rounded: Rounded) -> int:
    """Bytes of the gradients and the state that do not exist yet, if every parameter gets a gradient."""
    groups = [(group, [p for p in group["params"] if p.requires_grad]) for group in optimizer.param_groups]
    without = [p for _, params in groups for p in params if gradient_of(p) is None and is_on(device, p.device)]
    return sum(rounded(local_tensor(p).nbytes) for p in without) + rehearse(optimizer, groups, device, rounded).state_nbytes


def rehearse(optimizer: optim.Optimizer, groups: Iterable[Group], device: torch.device, rounded: Rounded) -> Update:
    """The bytes of the updates of these groups; `UNKNOWN` where only an update that has run can show them.

    Raises UnsupportedError where the class is registered, and its step is not as `register_optimizer` has it.
    """
    registered = is_registered(optimizer)
    if not (registered or _is_torchs(optimizer)):
        return UNKNOWN
    if type(optimizer) is optim.LBFGS:
        return _of_lbfgs(optimizer, rounded)
    updates = Update()
    for group, params in groups:
        on_device = [p for p in params if is_on(device, p.device)]
        if not on_device:
            continue
        if group.get("differentiable") or any(_gradient(p).layout is not torch.strided for p in on_device):
            return UNKNOWN
        try:
            with without_modes(), no_torch_functions():
                updates = updates.then(_of_group(optimizer, group, on_device, device, rounded))
        except (RuntimeError, TypeError, ValueError) as error:
            if registered:
                raise refusal(
                    optimizer, f"fails on tensors without memory: {error}", "Use ops that have a meta kernel"
                ) from error
            return UNKNOWN  # the user's own step raises the same error
    return updates


def _is_torchs(optimizer: optim.Optimizer) -> bool:
    """Whether the optimizer's step is torch's own. A scheduler may wrap it to count steps; the rehearsal does not call that."""
    modules = (type(optimizer).__module__, getattr(step_without_hooks(type(optimizer)), "__module__", None))
    return all(f"{module}.".startswith("torch.optim.") for module in modules)


class _Ledger(Outside):
    """Counts the bytes of the live tensors that ops have made.

    host: whether tensors of the host are counted, in addition to those without memory.
    existing: objects from before; the tensors among them are not counted.
    value: the number that Python reads of a tensor without memory.
    draws: whether an op has drawn random numbers.
    written: the storages that ops have written to.
    """

    def __init__(self, host: bool, rounded: Rounded, existing: Iterable[Any]) -> None:
        super().__init__()
        self.host, self.rounded = host, rounded
        self.live_nbytes = self.peak_nbytes = 0
        self.value = 1
        self.draws = False
        self.written: set[int] = set()
        self._existing = [t.untyped_storage() for t in existing if isinstance(t, torch.Tensor)]
        self._storages: dict[int, weakref.ref[Any]] = {s._cdata: weakref.ref(s) for s in self._existing}
        self._events: list[tuple[int, int]] = []
        self._events_at_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self.value
        given = dict[Any, Any](enumerate(args)) | (kwargs or {})
        written = tree_leaves([given.get(place) for place in rule_of(func).writes])
        self.written |= {t.untyped_storage()._cdata for t in written if isinstance(t, torch.Tensor)}
        if _only_writes(func) and args[0] and all(t.is_meta for t in args[0]):
            return None  # its kernels for `meta` would look at each tensor, and do nothing
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and self._counts(t.device):
                self._made(t.untyped_storage())
        within = 0
        if func in _PRODUCTS and args[0].dtype in (torch.bfloat16, torch.float16):  # the CPU packs an operand (Muon)
            within = max(self.rounded(t.nbytes) for t in args if isinstance(t, torch.Tensor))
        elif self.host and torch.Tag.pointwise in func.tags:
            within = sum(map(self.rounded, _casts(tree_leaves(args), tree_leaves(out))))
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + within)
        return out

    def _counts(self, device: torch.device) -> bool:
        return not has_memory(device) or (self.host and on_host(device))

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = self.rounded(storage.nbytes())
        self._storages[key] = weakref.ref(storage, partial(self._freed, key, nbytes))
        self.live_nbytes += nbytes
        self._events.append((key, nbytes))
        if self.live_nbytes > self.peak_nbytes:
            self.peak_nbytes, self._events_at_peak = self.live_nbytes, len(self._events)

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        del self._storages[key]
        self.live_nbytes -= nbytes
        self._events.append((key, 0))

    def begins(self) -> None:
        """Peaks start again from what there is now."""
        self.peak_nbytes, self._events_at_peak = self.live_nbytes, len(self._events)

    def beside(self) -> tuple[int, ...]:
        """The bytes of what was live at the peak and is not now."""
        live: dict[int, int] = {}
        for key, nbytes in self._events[: self._events_at_peak]:
            if nbytes:
                live[key] = nbytes
            else:
                live.pop(key, None)
        return pieces(self.peak_nbytes - self.live_nbytes, (n for key, n in live.items() if key not in self._storages))


@cache
def _only_writes(func: Any) -> bool:
    """Whether an op only writes the tensors of its first argument, a list."""
    schema = func._schema
    return schema.name.startswith("aten::_foreach_") and schema.name.endswith("_") and not schema.returns


def _casts(operands: Iterable[Any], results: Iterable[Any]) -> list[int]:
    """Bytes of the casts that a pointwise op of the CPU makes where its operands are of several floating types: of operands and
    results that are not of the type in which it computes. (CUDA's kernels cast number by number.)
    """
    read, made = ([t for t in each if _is_floating(t)] for each in (operands, results))
    types = {t.dtype for t in read}
    if len(types) < 2:
        return []
    computed = reduce(torch.promote_types, types)
    return [t.numel() * computed.itemsize for t in (*read, *made) if t.dtype != computed]


def _is_floating(t: Any) -> bool:
    """Whether it is a tensor of floating numbers, not of one alone: scalars are cast by themselves."""
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 0


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def _of_group(
    optimizer: optim.Optimizer, group: dict[str, Any], params: Sequence[torch.Tensor], device: torch.device, rounded: Rounded
) -> Update:
    options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    fused, capturable = bool(options.get("fused")), bool(options.get("capturable"))
    for name in ("fused", "capturable"):  # the `meta` device supports neither
        if name in options:
            options[name] = False
    if "foreach" in options and options["foreach"] is None and not fused:
        options["foreach"] = _foreach_by_default(options, params)
    kinds = [_kind(p, bool(optimizer.state.get(p))) for p in params]
    rehearsed = params if options.get("foreach") else [params[i] for i in _telling(kinds)]
    double, blank = _double(optimizer, options, rehearsed)
    before = {q: Counter(_sizes(double.state[q], rounded)) for q in blank}
    existing = tree_leaves([list(double.state.values()), blank, [q.grad for q in blank]])
    ledger = _Ledger(on_host(device), rounded, existing)
    step: Callable[[], Any]
    registered = RegisteredStep(double, ledger) if is_registered(optimizer) else None
    if registered is not None:
        step = registered
    else:
        raw = step_without_hooks(type(double))
        assert raw is not None, "it is torch's step"
        step = partial(raw, double)
    with contextlib.ExitStack() as stack:
        ledger.enter_in(stack)
        step()
        beside = ledger.beside()
        for number in (1, _LATER):
            ledger.value = number if number > options.get("t0", 0) else 1  # ASGD averages from then on
            ledger.begins()
            for state in double.state.values() if number > 1 else ():
                count = state.get("step")
                if isinstance(count, torch.Tensor) and not count.is_meta:
                    count.fill_(number)
            step()
            beside = max(beside, ledger.beside(), key=sum)
        if registered is not None:
            registered.without_gradients()
    made = {
        k: tuple((Counter(_sizes(double.state[q], rounded)) - before[q]).elements())
        for k, q in zip(_kinds(optimizer, rehearsed), blank, strict=True)
    }
    # a fused kernel makes no tensors; a capturable optimizer has scalars on the device, and more of them for a moment
    state = tuple(nbytes for k in kinds for nbytes in made[k])
    return Update(state, (SCALARS_NBYTES, *(() if fused else beside)), known=not capturable)


def _double(
    optimizer: optim.Optimizer, options: dict[str, Any], params: Sequence[torch.Tensor]
) -> tuple[optim.Optimizer, list[torch.Tensor]]:
    """A throw-away optimizer with one group of throw-away parameters, and these parameters."""
    blank = [_blank(p) for p in params]
    double = double_of(optimizer, options | {"params": blank})
    for p, q in zip(params, blank, strict=True):
        q.grad = _blank(_gradient(p))
        if optimizer.state.get(p):
            double.state[q] = tree_map_only(torch.Tensor, _blank, as_it_is(optimizer.state[p]))
    return double, blank


def _blank(t: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, without memory; of a distributed tensor, like the part in this process. Scalars on the CPU are
    copied: Python reads them (the number of steps).
    """
    t = local_tensor(t)
    if t.dim() == 0 and on_host(t.device):
        return t.detach().clone()
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)


def _kind(p: torch.Tensor, has_state: bool) -> Hashable:
    """The properties of a parameter on which its update depends, without the values."""
    return (*((t.size(), t.stride(), t.dtype) for t in (p, _gradient(p))), has_state)


def _gradient(p: torch.Tensor) -> torch.Tensor:
    """Its gradient; where it has none yet, the parameter itself, which has the same size."""
    gradient = gradient_of(p)
    return p if gradient is None else gradient


def _kinds(optimizer: optim.Optimizer, params: Sequence[torch.Tensor]) -> list[Hashable]:
    return [_kind(p, bool(optimizer.state.get(p))) for p in params]


def _telling(kinds: Sequence[Hashable]) -> list[int]:
    """Positions of parameters whose rehearsal is enough where parameters are updated one by one. Each pair of kinds in a row
    occurs once, because the temporary tensors of an update are freed only when the next update makes its own.
    """
    seen: set[tuple[Hashable, Hashable]] = set()
    chosen: set[int] = set()
    for i, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        if pair not in seen:
            seen.add(pair)
            chosen.update({max(i - 1, 0), i})
    return sorted(chosen)


def _sizes(state: Any, rounded: Rounded) -> list[int]:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(state) if isinstance(t, torch.Tensor)}
    return [rounded(s.nbytes()) for s in storages.values()]


def _foreach_by_default(options: dict[str, Any], params: Sequence[torch.Tensor]) -> bool | None:
    """The choice of torch on the device of these parameters. On the `meta` device it would choose differently."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    if isinstance(options.get("lr"), torch.Tensor):
        return None
    return _default_to_fused_or_foreach(list(params), bool(options.get("differentiable")), use_fused=False)[1]


def _of_lbfgs(optimizer: optim.Optimizer, rounded: Rounded) -> Update:
    """Counted for a full history, to which the state grows. Not rehearsed: the step is a loop around the user's closure."""
    (group,) = optimizer.param_groups
    params = group["params"]
    flat = rounded(sum(p.nbytes for p in params))
    state = optimizer.state.get(params[0], {})
    history = group["history_size"]
    # the history: directions and steps, with two numbers (ro, al) for each pair; the last direction and gradient; the scale of
    # the first guess (H_diag)
    number = rounded(params[0].element_size())
    full = history * 2 * (flat + number) + 2 * flat + number
    # two gradients, the last direction and its operand, and a pair that may not enter the history; a line search keeps points
    # and gradients of its own
    throughout = (6 if group["line_search_fn"] is None else 10) * flat
    missing = max(0, full - sum(_sizes(state, rounded)))
    return Update(pieces(missing, [flat] * (2 * history + 2)), (SCALARS_NBYTES,), throughout)
