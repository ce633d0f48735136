"""Name the rank that failed, where the error that ends a run came from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from lightning_memopt.ranks import of_collective
from lightning_memopt.session.session import Session


@contextlib.contextmanager
def naming(sessions: Callable[[], Iterable[Session]], collectives: bool = False) -> Iterator[None]:
    """Around code after which runs end, if it raises: then the other ranks of a distributed run hear of it.

    Raises RankFailedError instead of the error of a collective, where another rank failed first.

    Args:
        sessions: gives the sessions of these runs, when an error has come.
        collectives: the runs end by errors of collectives only; the loop may catch others.
    """
    try:
        yield
    except Exception as error:
        if collectives and not of_collective(error):
            raise
        failed = next(filter(None, (session.ended_by(error) for session in sessions())), None)
        if failed is None:
            raise
        raise failed from error
