"""The private and the replaced names of Accelerate are all there."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")


def test_no_name_is_missing() -> None:
    from lightning_memopt.integrations.accelerate_private import missing

    assert missing() == []
