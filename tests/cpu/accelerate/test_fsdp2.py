"""Models that Accelerate shards by FSDP2, in two processes with gloo (tests/cpu/lib/accelerate_sharded.py): bits and peaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from lightning_memopt.native import install  # noqa: E402
from tests.cpu.lib.launched import forked, ran  # noqa: E402

if not distributed.is_gloo_available():
    pytest.skip("no gloo", allow_module_level=True)
if not hasattr(accelerate.Accelerator, "is_fsdp2"):
    pytest.skip(f"Accelerate {accelerate.__version__} has no FSDP2", allow_module_level=True)

from tests.cpu.lib.accelerate_sharded import CASES, WORLD  # noqa: E402
from tests.cpu.lib.scripts import Interpreter  # noqa: E402

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    done = ran("tests.cpu.lib.accelerate_sharded", str(folder), timeout=400, **forked(interpreter))
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(WORLD)]


@pytest.mark.parametrize("case", [*CASES, "budget"])
def test_bits_are_those_of_the_unmodified_run(ranks: list[dict[str, Any]], case: str) -> None:
    for found in ranks:
        plain, planned = found[case]["plain"], found[case]["planned"]
        assert planned["state"] == plain["state"]
        assert planned["rebuilt"] > 0 and "left the plan" not in found[case]["said"]
    assert len({found[case]["plain"]["state"] for found in ranks}) == WORLD, "each rank has its part of the weights"


@pytest.mark.parametrize("case", [*CASES, "budget"])
def test_peaks_are_lower_and_predicted(ranks: list[dict[str, Any]], case: str) -> None:
    """The allocator's peak of the last step, in each rank."""
    if install() is None:
        pytest.skip("no native counter")
    for found in ranks:
        planned, share = found[case]["planned"], 1.0 if case == "checkpoints" else 0.8
        assert planned["measured"] < share * planned["unmodified"]
        for peak in (planned["measured"], planned["peak"]):
            assert peak == pytest.approx(planned["predicted"], rel=0.01)
        assert planned["measured"] <= found[case].get("budget", planned["needs"])


def test_fsdp1_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "UnsupportedError" in found["refused"]["error"] and "FSDP1" in found["refused"]["error"]
        assert found["refused"]["models"] == "0", "nothing has been prepared"
