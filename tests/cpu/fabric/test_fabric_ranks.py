"""Two real processes with gloo between them (tests/cpu/lib/fabric_ranks.py): the bits of Fabric's own DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import lightning_memopt

pytest.importorskip("lightning")
ROOT = Path(lightning_memopt.__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available() or sys.platform == "win32", reason="no gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    env = {k: v for k, v in os.environ.items() if k != "MEMOPT_DISABLE"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.cpu.lib.fabric_ranks", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]


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
