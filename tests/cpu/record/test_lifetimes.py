"""No reference cycles: what a step recorded dies with it, without the garbage collector."""

import gc
import weakref

import pytest
import torch

from lightning_memopt.native import engine as native
from lightning_memopt.runtime import ObservingEngine, PlannedEngine
from lightning_memopt.session.forward.recording import Recording
from lightning_memopt.session.observe import costs
from lightning_memopt.trace import user_held
from tests.cpu.lib.models import BATCHES, Noisy, X, attached, made, sgd, squares, train


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("recording", ["dropping", "keeping"])
def test_p11_nothing_outlives_a_step(recording, no_collector):
    """Engine, tape, slots and recorder die with the loss, without the garbage collector; backward done or not."""
    for backward in (True, False):
        model = made(Noisy)
        engine = ObservingEngine(pressure=(lambda: 1 << 62) if recording == "dropping" else None)
        recorder = engine.make_recorder()
        with Recording(engine, recorder, own_mode=True):
            loss = squares(model, X.clone())
        refs = [weakref.ref(o) for o in (engine, engine.tape, recorder)]
        refs += [weakref.ref(s.alive()) for s in engine.tape.versions.values() if s.alive() is not None and not s.external]
        if backward:
            loss.backward()
        model.zero_grad()
        del engine, recorder, loss
        assert [r() for r in refs if r() is not None] == []


def test_p11_nothing_outlives_a_planned_step(no_collector, monkeypatch):
    """At the front: engines, tapes and slots of observed and planned steps are dead after the step."""
    costs._once(torch.device("cpu"), 0)  # once a process, by engines of its own
    refs = []
    for kind in (ObservingEngine, PlannedEngine):
        original = kind.__init__

        def init(self, *args, original=original, **kwargs):
            original(self, *args, **kwargs)
            refs.append(weakref.ref(self))
            refs.append(weakref.ref(self.tape))

        monkeypatch.setattr(kind, "__init__", init)
    model = made(Noisy)
    optimizer = sgd(model)
    with attached(model, optimizer) as run:
        for batch in BATCHES:
            train(model, [batch], optimizer=optimizer)
            alive = [type(r()).__name__ for r in refs if r() is not None]
            assert alive == [], f"alive after a step {'planned' if run.plan else 'observed'}"
    assert len(refs) == 2 * len(BATCHES)


def test_the_collector_may_run_while_the_tracer_looks(monkeypatch):
    """Cycles in user code that hold activations: their end is told in the middle of a poll, wherever the collector runs."""
    cycles, collected = [], []

    class Cyclic(Noisy):
        def between(self, h, i):
            cycle = [h.sin()]
            cycle.append(cycle)
            cycles.append(cycle)
            return super().between(h, i)

    def count(storage, original=user_held.storage_use_count):
        if cycles:
            cycles.clear()
            collected.append(gc.collect())
        return original(storage)

    model = made(Cyclic)
    monkeypatch.setattr(native, "_module", None)  # C++ makes no object while it looks
    monkeypatch.setattr(user_held, "storage_use_count", count)
    with attached(model, sgd(model)):
        train(model, BATCHES[:1])
    assert collected
