"""The example and the configuration files in configs/ work as they are."""

from __future__ import annotations

import re

import pytest
from torch import distributed

from tests.cpu.lib.launched import OURS, ROOT, forked, port, ran
from tests.cpu.lib.scripts import Interpreter

accelerate = pytest.importorskip("accelerate")

EXAMPLE = str(ROOT / "examples" / "accelerate_script.py")


def config(name: str) -> list[str]:
    return ["--config_file", str(ROOT / "configs" / name)]


def loss(printed: str) -> list[str]:
    return re.findall(r"loss ([\d.]+)", printed)


def test_one_process(interpreter: Interpreter) -> None:
    planned = ran(*OURS, *config("accelerate_single.yaml"), "--cpu", EXAMPLE, **forked(interpreter))
    assert planned.returncode == 0 and len(loss(planned.stdout)) == 1, planned.stderr
    assert planned.stderr.count("measured peak") == 1 and "40.00 MiB" in planned.stderr


@pytest.mark.long
@pytest.mark.skipif(not distributed.is_gloo_available(), reason="no gloo")
@pytest.mark.skipif(not hasattr(accelerate.Accelerator, "is_fsdp2"), reason="Accelerate without FSDP2")
def test_two_processes_with_sharded_weights(interpreter: Interpreter) -> None:
    """Accelerate is made to shard on the CPU; the loss is that of the plain run, printed to its last digit."""
    command = [*OURS, *config("accelerate_fsdp2.yaml"), *port(), "-m", "tests.cpu.lib.fsdp_on_cpu", EXAMPLE]
    forks = forked(interpreter) | {"ACCELERATE_USE_CPU": "true"}
    planned, plain = (ran(*command, timeout=300, MEMOPT_DISABLE=disabled, **forks) for disabled in ("", "1"))
    assert planned.returncode == plain.returncode == 0, planned.stderr + plain.stderr
    assert loss(planned.stdout) == loss(plain.stdout) and len(loss(plain.stdout)) == 1
    assert planned.stderr.count("measured peak") == 1 and "ops run again" in planned.stderr
    assert "measured peak" not in plain.stdout + plain.stderr + planned.stdout
