"""No loader of a module is held in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_loader_is_held() -> Iterator[None]:
    """A Trainer that stops within an epoch does not end the iterator of its loader.

    Accelerate then goes on with the loader as the one that is read, and before 1.4 holds it, with its data.
    """
    yield
    from accelerate.state import GradientState

    GradientState._reset_state()
