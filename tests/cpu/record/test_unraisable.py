"""Several runs at once, and the one hook that Python has for exceptions in destructors."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memopt import optimize
from lightning_memopt.record import interrupts
from tests.cpu.lib.loops import QUIET, sgd, small


def _told(error: BaseException, owner: object = None) -> None:
    sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=None, err_msg=None, object=owner))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What reaches the hook that is there before any run."""
    errors: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: errors.append(unraisable.exc_value))
    return errors


ORDERS = [o for o in itertools.permutations("AaBb") if all(o.index(x) < o.index(x.lower()) for x in "AB")]


@pytest.mark.parametrize("others", [None, *range(4)])
def test_runs_open_and_close_in_any_order(seen: list[BaseException], others: int | None) -> None:
    """The hook of the others is told of each exception once, at every moment, also when one of them replaces it."""
    before = sys.unraisablehook
    theirs: list[BaseException] = []

    def replaced() -> None:
        previous = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            theirs.append(unraisable.exc_value)
            previous(unraisable)

        sys.unraisablehook = hook

    for order in ORDERS:
        sys.unraisablehook = before
        open_now: dict[str, contextlib.ExitStack] = {}
        for i, event in enumerate(order):
            if event.isupper():
                model = small()
                open_now[event] = contextlib.ExitStack()
                open_now[event].enter_context(optimize(model, sgd(model), budget="min", **QUIET))
            else:
                open_now.pop(event.upper()).close()
            if others == i:
                replaced()
                expected = sys.unraisablehook
            error = ValueError()
            _told(error)
            assert seen == [error]
            assert theirs == ([error] if others is not None and i >= others else [])
            seen.clear()
            theirs.clear()
        if others is None:
            expected = before
        assert sys.unraisablehook is expected


def test_interrupt_in_a_destructor_of_ours_is_kept_while_any_run_is_open(seen: list[BaseException]) -> None:
    def ours() -> None: ...

    ours.__module__ = "lightning_memopt.anything"
    first, second = small(), small()
    with optimize(first, sgd(first), budget="min", **QUIET):
        with optimize(second, sgd(second), budget="min", **QUIET):
            pass
        _told(KeyboardInterrupt(), ours)
        assert not seen
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_deferred()
    _told(KeyboardInterrupt(), ours)
    assert len(seen) == 1


def test_an_interrupt_in_a_finalizer_is_kept_whosever_it_is(seen: list[BaseException]) -> None:
    """It is known to be dead, and nothing else. Other exceptions in it are left to the hook that was there."""

    def raises(error: BaseException) -> None:
        raise error

    model = small()
    with optimize(model, sgd(model), budget="min", **QUIET):
        for error in (KeyboardInterrupt(), other := ValueError()):
            weakref.finalize(held := small(), raises, error)
            del held
        assert seen == [other]
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_deferred()
