"""What a forward op looked like when it was matched to the plan: compared by the next step, instead of recorded again.

Steps repeat themselves. When an op meets its template (the same overload, the same constants, the same windows on the same
tensors of the plan), the call noted then is the recipe of this step too, because calls name slots by the plan's tensors. All
that is new in a step are its storages. An op that differs in anything is recorded as if for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from lightning_memopt.record import Call, OpRecord, Slot, View, rules_generation

_COMPARED = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two arguments that are no tensors mean the same to an op: 1 is not 1.0, and -0.0 is not 0.0."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return bool(a == b) and (a != 0.0 or str(a) == str(b))
    if kind is list or kind is tuple:
        return len(a) == len(b) and all(map(same_constant, a, b))
    return kind in _COMPARED and bool(a == b)


def flattened(args: tuple) -> list[Any]:
    """Arguments with lists of tensors laid out, each followed by its length."""
    flat: list[Any] = []
    for a in args:
        if type(a) in (list, tuple) and any(isinstance(v, (torch.Tensor, View)) for v in a):
            flat.extend(a)
            flat.append(len(a))
        else:
            flat.append(a)
    return flat


@dataclass(frozen=True, slots=True)
class Template:
    """One op of the plan's forward. Positions are those in `args`, or in `flattened(args)` where `nested`; `arity` counts them.

    `tensors`: position and window (on a tensor of the plan) of every tensor that the op reads. `constants`: position and
    value of the rest. `call`: the recipe, None where there is none; `random`: it needs the generator's state. `made`: index
    among the tensors returned, tensor, bytes; `mutates`: position, tensor made.
    `kwargs` is None where arguments do not matter. `writes`:
    positions in `args` of what it writes and the plan knows nothing of; in memory that is known, this is another op.
    """

    func: OpOverload
    arity: int
    nested: bool
    tensors: tuple[tuple[int, View], ...]
    constants: tuple[tuple[int, Any], ...]
    kwargs: tuple[tuple[str, Any], ...] | None
    grad: bool
    call: Call | None
    random: bool
    made: tuple[tuple[int, int, int], ...]
    mutates: tuple[tuple[int, int], ...]
    empty: bool
    why: str
    writes: tuple[int, ...] = ()


class Templates:
    """Those learned so far, by position in the forward; an overload alone where nothing depends on the op. The last entry
    stays None.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.found: list[Template | OpOverload | None] = []
        self._settings: tuple[Any, ...] | None = None

    def current(self) -> list[Template | OpOverload | None]:
        """The templates, none of them if rules or settings changed that say what may run again."""
        settings = (rules_generation(), torch.are_deterministic_algorithms_enabled())
        if settings != self._settings:
            self._settings = settings
            self.found = [None] * (self.n + 1)
        return self.found


class _Unnamed(Exception):
    """A slot that is no tensor of the plan."""


def _named(view: View, slots: dict[int, Slot]) -> View:
    """The window, on the tensor of the plan that its slot was matched to."""
    found: View = View.__new__(View)
    for name in View.__slots__:
        setattr(found, name, getattr(view, name))
    found.slot = _tensor(view.slot, slots)
    return found


def _tensor(id: int, slots: dict[int, Slot]) -> int:
    found = slots[id].plan
    if found is None:
        raise _Unnamed
    return found


def _named_call(call: Call, slots: dict[int, Slot]) -> Call:
    """The call in terms of the plan's tensors, without what belongs to one step."""
    args: list[Any] = []
    for a in call.args:
        if type(a) is list:
            args.append([_named(x, slots) if type(x) is View else x for x in a])
        else:
            args.append(_named(a, slots) if type(a) is View else a)
    found = Call(call.op, call.func, args, call.kwargs, tuple(_tensor(id, slots) for id in call.reads), call.grad)
    found.made = tuple((index, _tensor(id, slots)) for index, id in call.made)
    found.mutates = tuple((_tensor(old, slots), _tensor(new, slots)) for old, new in call.mutates)
    found.repeats = call.repeats
    return found


def _special(record: OpRecord) -> bool:
    """Whether running the op takes the recorder's care."""
    rule = record.rule
    foreach = record.func._name.startswith("aten::_foreach_")
    return rule.conjugates or rule.unshared or foreach or any(isinstance(where, str) for where in rule.writes)


def in_passing(record: OpRecord) -> Template | OpOverload | None:
    """What there is to know of an op that nothing depends on; None where running it takes the recorder's care."""
    if _special(record):
        return None
    return _whatever(record, (), ()) if record.rule.writes else record.func


def start_of(record: OpRecord, tracked: frozenset[int]) -> Template | None:
    """The template of an op that does not run again: whatever it is given, its results are what rebuilds start from."""
    positions = {value.slot: i for i, value in enumerate(record.args) if type(value) is View}
    if _special(record) or not all(old.id in positions for old, _, _ in record.mutates):
        return None
    mutates = tuple((positions[old.id], new.plan) for old, new, _ in record.mutates if new.plan in tracked)
    made = tuple((slot.index, slot.plan, slot.nbytes) for slot, _ in record.made if slot.plan in tracked)
    return _whatever(record, made, mutates)


def _whatever(record: OpRecord, made: tuple[tuple[int, Any, int], ...], mutates: tuple[tuple[int, Any], ...]) -> Template:
    """The template of an op that does not run again, whatever it is given."""
    positions = {i for i, _ in mutates}
    return Template(
        func=record.func,
        arity=len(record.args),
        nested=False,
        tensors=(),
        constants=(),
        kwargs=None,
        grad=torch.is_grad_enabled(),
        call=None,
        random=False,
        made=made,
        mutates=mutates,
        empty=False,
        why="it is not planned to run again",
        writes=tuple(where for where in record.rule.writes if isinstance(where, int) and where not in positions),
    )


def template_of(record: OpRecord, slots: dict[int, Slot]) -> Template | None:
    """The template of an op that was recorded and matched; None where comparing it is not enough.

    Not enough: generators and subclasses among the arguments, windows that are conjugate or negative, views that count
    versions for themselves, slots that are no tensors of the plan. Nor is there one of an op that this step cannot run again:
    the next step may.
    """
    rule, call = record.rule, record.call
    if call is None or rule.conjugates or rule.unshared or not all(same_constant(v, v) for v in record.kwargs.values()):
        return None
    new = [slot for slot, _ in record.made] + [slot for _, slot, _ in record.mutates]
    if not all(slot.ok or slot.empty for slot in new):
        return None
    nested = any(type(a) is list and any(type(v) is View for v in a) for a in record.args)
    values = flattened(record.args) if nested else record.args
    reads = {slot.id for slot in record.reads}
    tensors, constants = [], []
    try:
        for i, value in enumerate(values):
            if type(value) is View:
                if value.slot not in reads and rule.rewrite is not None:
                    continue  # running statistics, which the recipe leaves out
                if value.conj or value.neg:
                    return None
                tensors.append((i, _named(value, slots)))
            elif same_constant(value, value):
                constants.append((i, value))
            else:
                return None
        named = _named_call(call, slots)
        made = tuple((slot.index, _tensor(slot.id, slots), slot.nbytes) for slot, _ in record.made)
        mutates = tuple(
            (next(i for i, view in tensors if view.slot == old.plan), _tensor(new.id, slots)) for old, new, _ in record.mutates
        )
    except _Unnamed:
        return None
    return Template(
        func=record.func,
        arity=len(values),
        nested=nested,
        tensors=tuple(tensors),
        constants=tuple(constants),
        kwargs=tuple(record.kwargs.items()),
        grad=torch.is_grad_enabled(),
        call=named,
        random=call.rng is not None,
        made=made,
        mutates=mutates,
        empty=rule.handling == "empty",
        why=new[0].why if new else "",
        writes=tuple(where for where in rule.writes if isinstance(where, int)) if rule.rewrite is not None else (),
    )
