"""No loader of a module is held in the next, and no module that silences transformers silences the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(autouse=True, scope="module")
def no_loader_is_held() -> Iterator[None]:
    """A Trainer that stops within an epoch does not end the iterator of its loader.

    Accelerate then goes on with the loader as the one that is read, and before 1.4 holds it, with its data.
    """
    yield
    from accelerate.state import GradientState

    GradientState._reset_state()


@pytest.fixture(autouse=True, scope="module")
def transformers_speaks() -> Iterator[None]:
    """The models of benchmarks set its verbosity when they are imported, and the lines of its runs follow that."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)
