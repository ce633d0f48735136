"""What only tests look at: the state of a session, behind its status."""

from typing import Any

from lightning_memopt.session import Session


def state_of(run: Any) -> Any:
    """The main state of a run, a strategy or a session."""
    return states_of(run).main


def current_of(run: Any) -> Any:
    """The state that the last forward of a run belonged to."""
    return run.session._current


def states_of(run: Any) -> Any:
    """The states of a run, a strategy or a session, by signature."""
    session = run if isinstance(run, Session) else run.session
    return session._plan_cache
