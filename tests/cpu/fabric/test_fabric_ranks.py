"""Two real processes with gloo between them (tests/cpu/lib/fabric_ranks.py): the bits of Fabric's own DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.written import needs_gloo, of_ranks

pytest.importorskip("lightning")
pytestmark = needs_gloo


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> list[dict[str, Any]]:
    return of_ranks(2, "fabric_ranks", tmp_path_factory.mktemp("ranks"), timeout=200, by=package_interpreter)


@pytest.mark.parametrize("method", ["forward", "loss"])
def test_fabrics_ddp_bit_by_bit(ranks: list[dict[str, Any]], method: str) -> None:
    """Accumulation without synchronisation, clipping, a last smaller batch, a method marked as a forward; a strategy for one
    device that gets two becomes DDP. The run is of the DDP module.
    """
    for found in ranks:
        plain, planned = found[method]
        assert all(planned[key] == plain[key] for key in ("state", "losses", "drawn"))
        assert planned["strategy"] == "MemOptFabricDDPStrategy" and planned["attached"] == "DistributedDataParallel"
        assert planned["rebuilt"] > 0 and planned["alike"]
