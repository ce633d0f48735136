"""A template is a forward op as it was when it was first matched to the plan. Later steps compare the op with its template, and
do not record it again.

Steps are alike. If an op matches its template (the same overload, the same constants, the same windows on the same tensors of
the plan), the template's call can rebuild the results of this step, too, because it names storage versions by tensors of the
plan. Only the storages of a step are new. An op that differs in any way is recorded as if for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memopt.native.engine import loaded
from lightning_memopt.record import Call, OpRecord, View, rules_in_force
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.rebuild import Versions, prepared
from lightning_memopt.torch_private import OpOverload

_COMPARED = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two arguments that are not tensors mean the same to an op: 1 is not 1.0, and -0.0 is not 0.0."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return bool(a == b) and (a != 0.0 or str(a) == str(b))
    if kind is list or kind is tuple:
        return len(a) == len(b) and all(map(same_constant, a, b))
    return kind in _COMPARED and bool(a == b)


def flattened(args: tuple) -> list[Any]:
    """The arguments, with each list of tensors replaced by its elements and then its length."""
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
    """One op of the plan's forward. Positions are those in `args`, or in `flattened(args)` if `nested`.

    func: the overload.
    arity: number of positions.
    nested: whether arguments are lists of tensors.
    tensors: (position, window on a tensor of the plan) of every tensor that the op reads.
    constants: (position, value) of all other arguments.
    kwargs: (name, value); None if arguments are not compared.
    grad: the grad mode.
    call: runs the op again; None if it never runs again.
    random: whether the call needs the generator's state.
    made: (index among the tensors returned, tensor, bytes, whether the call makes it again) of each result.
    mutates: (position, tensor made) of each tensor that the op writes in place.
    empty: whether the results have no content yet.
    why: why the results cannot be rebuilt.
    writes: positions in `args` of memory that the op writes and that is not on the tape. If it is on the tape, the op does
        not match.
    unshared: whether the results are views with their own version counters (`Rule.unshared`).
    native: the native engine's form of it; None if Python compares the op.
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
    made: tuple[tuple[int, int, int, bool], ...]
    mutates: tuple[tuple[int, int], ...]
    empty: bool
    why: str
    writes: tuple[int, ...] = ()
    unshared: bool = False
    native: object = None


class Templates:
    """The templates so far.

    by_op: by position in the forward. An entry is just an overload if the plan does not depend on the op, and None if there
        is no template. The last entry, after the last op, is always None.
    restless: whether the forward runs a backward (a penalty on gradients), so that saved-tensor hooks are never off.
    """

    def __init__(self, n_ops: int) -> None:
        self.by_op: list[Template | OpOverload | None] = []
        self.restless = False
        self._n_ops = n_ops
        self._settings: tuple[Any, ...] | None = None

    def current(self) -> list[Template | OpOverload | None]:
        """The templates. They are all forgotten when a rule or setting changes that decides which ops may run again."""
        settings = rules_in_force()
        if settings != self._settings:
            self.by_op = self.none()
            self._settings = settings  # last, so that an interrupt in between does no harm
        return self.by_op

    def none(self) -> list[Template | OpOverload | None]:
        """No template for any op."""
        return [None] * (self._n_ops + 1)


class _Unnamed(Exception):
    """A storage version is not a tensor of the plan."""


def _named(view: View, versions: Versions) -> View:
    """The same window, with the plan's tensor instead of the id of its version."""
    named: View = View.__new__(View)
    for name in View.__slots__:
        setattr(named, name, getattr(view, name))
    named.version = _tensor(view.version, versions)
    return named


def _tensor(id: int, versions: Versions) -> int:
    tensor = versions[id].holding.tensor
    if tensor is None:
        raise _Unnamed
    return tensor


def _named_call(call: Call, versions: Versions) -> Call:
    """The call in terms of the plan's tensors, without the state of the generator."""
    args: list[Any] = []
    for a in call.args:
        if type(a) is list:
            args.append([_named(x, versions) if type(x) is View else x for x in a])
        else:
            args.append(_named(a, versions) if type(a) is View else a)
    named = Call(call.op, call.func, args, call.kwargs, tuple(_tensor(id, versions) for id in call.reads), call.grad)
    named.made = tuple((index, _tensor(id, versions)) for index, id in call.made)
    named.mutates = tuple((_tensor(old, versions), _tensor(new, versions)) for old, new in call.mutates)
    named.repeats = call.repeats
    return named


def with_state(call: Call, generator: torch.Generator) -> Call:
    """The call for this step, with the present state of the generator."""
    own = Call(call.op, call.func, call.args, call.kwargs, call.reads, call.grad)
    own.made, own.mutates, own.prepared = call.made, call.mutates, call.prepared
    own.rng = (generator, generator.get_state())
    return own


def _special(record: OpRecord) -> bool:
    """Whether only `Recorder.record` can run the op correctly."""
    rule = record.rule
    foreach = record.func._name.startswith("aten::_foreach_")
    return rule.conjugates or rule.counted_first or foreach or any(isinstance(where, str) for where in rule.writes)


def in_passing(record: OpRecord) -> Template | OpOverload | None:
    """The template of an op on which the plan does not depend; None if `Recorder.record` must run it."""
    if _special(record):
        return None
    return _whatever(record, (), ()) if record.rule.writes or record.rule.unshared else record.func


def start_of(record: OpRecord, tracked: frozenset[int]) -> Template | None:
    """The template of an op that never runs again, but from whose results rebuilds start. Its arguments are not compared."""
    positions = {value.version: i for i, value in enumerate(record.args) if type(value) is View}
    if _special(record) or not all(old.id in positions for old, _, _ in record.mutates):
        return None
    mutates = tuple((positions[old.id], new.holding.tensor) for old, new, _ in record.mutates if new.holding.tensor in tracked)
    made = tuple((v.index, v.holding.tensor, v.nbytes, False) for v, _ in record.made if v.holding.tensor in tracked)
    return _whatever(record, made, mutates)


def _whatever(record: OpRecord, made: tuple[tuple[int, Any, int, bool], ...], mutates: tuple[tuple[int, Any], ...]) -> Template:
    """The template of an op that never runs again. Its arguments are not compared."""
    positions = {i for i, _ in mutates}
    template = Template(
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
        unshared=record.rule.unshared,
    )
    return _compared_natively(template, [], {})


def template_of(record: OpRecord, versions: Versions) -> Template | None:
    """The template of an op that was recorded and matched; None if comparing arguments is not enough.

    It is not enough for generators and subclasses among the arguments, windows that are conjugate or negative, and storage
    versions that are not tensors of the plan. An op that cannot run again in this step has no template, either, because it
    may be able to in the next one.
    """
    rule, call = record.rule, record.call
    if call is None or rule.conjugates or not all(same_constant(v, v) for v in record.kwargs.values()):
        return None
    again = {id for _, id in call.made}
    new: list[Version] = [version for version, _ in record.made if version.id in again]
    new += [version for _, version, _ in record.mutates]
    if not all(version.holding.reachable or version.empty for version in new):
        return None
    nested = any(type(a) is list and any(type(v) is View for v in a) for a in record.args)
    values = flattened(record.args) if nested else record.args
    reads = {version.id for version in record.reads}
    tensors, constants = [], []
    try:
        for i, value in enumerate(values):
            if type(value) is View:
                if value.version not in reads and rule.rewrite is not None:
                    continue  # running statistics, which the call does not have
                if value.conj or value.neg:
                    return None
                tensors.append((i, _named(value, versions)))
            elif same_constant(value, value):
                constants.append((i, value))
            else:
                return None
        named = _named_call(call, versions)
        named.prepared = prepared(named, random=call.rng is not None)
        made = tuple((v.index, _tensor(v.id, versions), v.nbytes, v.id in again) for v, _ in record.made)
        mutates = tuple(
            (next(i for i, view in tensors if view.version == old.holding.tensor), _tensor(new.id, versions))
            for old, new, _ in record.mutates
        )
    except _Unnamed:
        return None
    template = Template(
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
        unshared=rule.unshared,
        writes=tuple(where for where in rule.writes if isinstance(where, int)) if rule.rewrite is not None else (),
    )
    given = [_given(value, versions, reads) for value in record.args]
    return _compared_natively(template, given, record.kwargs)


def _given(value: Any, versions: Versions, reads: set[int]) -> Any:
    """An argument in terms of the plan's tensors; `...` for running statistics, which are not compared."""
    if type(value) is list:
        return [_given(v, versions, reads) for v in value]
    if type(value) is not View:
        return value
    return _named(value, versions) if value.version in reads else ...


def _compared_natively(template: Template, args: list[Any], kwargs: dict[str, Any]) -> Template:
    """The template with its native form, where there is one. `args`: in terms of the plan's tensors."""
    engine = loaded()
    return template if engine is None else replace(template, native=engine.template(template, args, kwargs))
