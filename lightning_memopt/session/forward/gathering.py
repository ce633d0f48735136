"""What recorder, tracer and engine are told of things that the recorder does not see.

The weights of sharded modules come and go (record/gathered.py); code that a compiler generated runs (record/compiled_code.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_memopt.record import Recorder, storage_id
from lightning_memopt.record.gathered import Event, is_there, unseen_by, weights_of
from lightning_memopt.record.settling import can_settle
from lightning_memopt.runtime import ObservingEngine, let_go
from lightning_memopt.runtime.engine.units import Units
from lightning_memopt.torch_private import keeps_weights
from lightning_memopt.trace import Gathered, Tracer, backward_runs, generated_code


class Hidden:
    """The listener of a planned forward: what happens in hooks is hidden from its recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @contextlib.contextmanager
    def __call__(self, unit: Any, event: Event) -> Iterator[None]:
        with unseen_by(self.recorder) if event == "hook" else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def observed_code(recorder: Recorder, tracer: Tracer, engine: ObservingEngine) -> Iterator[None]:
    """Around a run of generated code in an observed step: its ops are hidden from the recorder."""
    if backward_runs():
        let_go(engine)
    with unseen_by(recorder), generated_code(tracer):
        yield


class Watched(Hidden):
    """The listener of an observed round: it also follows the weights, and the units that run.

    gathered: puts windows and hooks into the graph.
    units: knows which rebuilds would need weights that are away.
    """

    def __init__(self, recorder: Recorder, tracer: Tracer, units: Units) -> None:
        super().__init__(recorder)
        self.gathered, self.units = Gathered(tracer), units
        self._depth = 0

    def begins(self, units: Iterable[Any]) -> None:
        """A round begins: weights may be there since an earlier one."""
        for unit in units:
            self._follow(unit)

    @contextlib.contextmanager
    def __call__(self, unit: Any, event: Event) -> Iterator[None]:
        if event == "entered":
            self.units.running.append(id(unit))
        elif event == "left" and self.units.running:
            self.units.running.pop()
        if event != "hook" or self._depth:  # hooks call each other
            yield
            return
        self._depth += 1
        try:
            with unseen_by(self.recorder), self.gathered.hook(can_settle()):
                yield
                self._follow(unit)
        finally:
            self._depth -= 1

    def _follow(self, unit: Any) -> None:
        """Find which weights of a unit are there now."""
        for name, weight in weights_of(unit):
            if is_there(weight):
                version = self.recorder.adopt(weight)
                self.gathered.there(version, name)
                if not keeps_weights(unit):
                    self.units.gathered(version, id(unit))
            elif (known := self.recorder.of_storage.get(storage_id(weight))) is not None:
                self.gathered.away(known)
