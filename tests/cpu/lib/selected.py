"""Which cases of a file are asked about: a fixture that runs all cases in one go need not run the others."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, name: str, value: Any) -> bool:
    """Whether a test of the file that asks for this fixture was selected with this value of a parameter."""
    items = (item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function))
    return any(getattr(item, "callspec", None) is not None and item.callspec.params.get(name) == value for item in items)
