"""A template is a forward op as it was when it was first matched to the plan. The native engine compares the op of a later step
with its template, and runs it without recording it again. Where there is no native engine, there are no templates, and every
op is recorded.

Steps are alike. If an op matches its template (the same overload, the same constants, the same windows on the same tensors of
the plan), the template's call can rebuild the results of this step, too, because it names storage versions by tensors of the
plan. Only the storages of a step are new. An op that differs in any way is recorded as if for the first time.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_memopt.record import Call, OpRecord, View, rules_in_force
from lightning_memopt.runtime.engine.holding import Version
from lightning_memopt.runtime.engine.program import Program
from lightning_memopt.runtime.engine.rebuild import Versions, prepared
from lightning_memopt.torch_private import OpOverload

Template = object
"""One op of the plan's forward, in the native engine's form (`Template` in native/engine/matching.h)."""


class Templates:
    """The templates so far.

    learned: the templates, in the native engine's form.
    restless: whether the forward runs a backward (a penalty on gradients), so that saved-tensor hooks are never off.
    """

    def __init__(self, engine: Any, program: Program) -> None:
        """engine: the native engine; None where there is none, and so no template."""
        self.restless = False
        self._engine = engine
        self._program = program
        self.learned: object = None
        self._settings: tuple[Any, ...] | None = None

    def current(self) -> object:
        """`learned`. The templates are all forgotten when a rule or setting changes that decides which ops may run again."""
        settings = rules_in_force()
        if settings != self._settings:
            self.learned = self.none()
            self._settings = settings  # last, so that an interrupt in between does no harm
        return self.learned

    def none(self) -> object:
        """No template for any op."""
        if self._engine is None:
            return None
        program = self._program
        return self._engine.templates(len(program.graph.forward), program.holds, program.unsaved, program.sized_by_data)


class _Unnamed(Exception):
    """A storage version is not a tensor of the plan."""


class _Naming:
    """Replaces storage versions by tensors of the plan. Its methods raise _Unnamed if a version is not one of them.

    versions: the versions of the tape, by id.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def tensor(self, id: int) -> int:
        """The plan's tensor of the version with this id."""
        tensor = self._versions[id].holding.tensor
        if tensor is None:
            raise _Unnamed
        return tensor

    def value(self, value: Any, ignored: frozenset[int] = frozenset()) -> Any:
        """An argument with windows on tensors of the plan; `...` for windows on versions that are `ignored`."""
        if type(value) is list:
            return [self.value(v, ignored) for v in value]
        if not isinstance(value, View):
            return value
        return ... if value.version in ignored else value.named(self.tensor(value.version))

    def call(self, call: Call) -> Call:
        """The call in terms of the plan's tensors, without the state of the generator."""
        kwargs = {name: self.value(v) for name, v in call.kwargs.items()}
        reads = tuple(map(self.tensor, call.reads))
        named = type(call)(call.op, call.func, [self.value(v) for v in call.args], kwargs, reads, call.grad)
        named.made = tuple((index, self.tensor(id)) for index, id in call.made)
        named.mutates = tuple((self.tensor(old), self.tensor(new)) for old, new in call.mutates)
        named.repeats = call.repeats
        named.prepared = prepared(named, random=call.rng is not None)
        return named


def with_state(call: Call, generator: torch.Generator) -> Call:
    """The call for this step, with the present state of the generator."""
    own = type(call)(call.op, call.func, call.args, call.kwargs, call.reads, call.grad)
    own.made, own.mutates, own.prepared = call.made, call.mutates, call.prepared
    own.rng = (generator, generator.get_state())
    return own


def _special(record: OpRecord) -> bool:
    """Whether only `Recorder.record` can run the op correctly."""
    rule = record.rule
    foreach = record.func._name.startswith("aten::_foreach_")
    return rule.conjugates or rule.counted_first or foreach or any(isinstance(where, str) for where in rule.writes)


def _positions(record: OpRecord) -> dict[int, int]:
    """Id of a version -> the position among the arguments of the tensor on it."""
    return {value.version: i for i, value in enumerate(record.args) if isinstance(value, View)}


def in_passing(engine: Any, record: OpRecord) -> Template | OpOverload | None:
    """The template of an op on which the plan does not depend; None if `Recorder.record` must run it."""
    if _special(record):
        return None
    return _whatever(engine, record, (), ()) if record.rule.writes or record.rule.unshared else record.func


def start_of(engine: Any, record: OpRecord, tracked: frozenset[int]) -> Template | None:
    """The template of an op that never runs again, but from whose results rebuilds start. Its arguments are not compared."""
    positions = _positions(record)
    if _special(record) or not all(old.id in positions for old, _, _ in record.mutates):
        return None
    mutates = tuple((positions[old.id], new.holding.tensor) for old, new, _ in record.mutates if new.holding.tensor in tracked)
    made = tuple((v.index, v.holding.tensor, v.nbytes, False) for v, _ in record.made if v.holding.tensor in tracked)
    return _whatever(engine, record, made, mutates)


def _whatever(
    engine: Any, record: OpRecord, made: tuple[tuple[int, Any, int, bool], ...], mutates: tuple[tuple[int, Any], ...]
) -> Template | None:
    """The template of an op that never runs again. Its arguments are not compared."""
    positions = {i for i, _ in mutates}
    return engine.template(
        func=record.func,
        args=None,
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


def template_of(engine: Any, record: OpRecord, versions: Versions) -> Template | None:
    """The template of an op that was recorded and matched; None if comparing arguments is not enough.

    It is not enough for generators and subclasses among the arguments, windows that are conjugate or negative, and storage
    versions that are not tensors of the plan. An op that cannot run again in this step has no template, either, because it
    may be able to in the next one.
    """
    rule = record.rule
    call = record.call
    naming = _Naming(versions)
    if call is None or rule.conjugates:
        return None
    again = {id for _, id in call.made}
    new: list[Version] = [version for version, _ in record.made if version.id in again]
    new += [version for _, version, _ in record.mutates]
    if not all(version.holding.reachable or version.empty for version in new):
        return None
    positions = _positions(record)
    statistics: frozenset[int] = frozenset()  # running statistics: the call does not have them, and they are not compared
    if rule.rewrite is not None:
        statistics = frozenset(positions.keys() - {version.id for version in record.reads})
    try:
        named = naming.call(call)
        return engine.template(
            func=record.func,
            args=[naming.value(v, statistics) for v in record.args],
            kwargs={name: naming.value(v, statistics) for name, v in record.kwargs.items()},
            grad=torch.is_grad_enabled(),
            call=named,
            random=call.rng is not None,
            made=tuple((v.index, naming.tensor(v.id), v.nbytes, v.id in again) for v, _ in record.made),
            mutates=tuple((positions[old.id], naming.tensor(new.id)) for old, new, _ in record.mutates),
            empty=rule.handling == "empty",
            why=new[0].why if new else "",
            writes=tuple(where for where in rule.writes if isinstance(where, int)) if rule.rewrite is not None else (),
            unshared=rule.unshared,
        )
    except (_Unnamed, KeyError):  # KeyError: the op writes a tensor of a list, or one that it is given by name
        return None
