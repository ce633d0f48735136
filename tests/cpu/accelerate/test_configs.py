"""The example and the configuration files in configs/ work as they are."""

from __future__ import annotations

import re

import pytest
from torch import distributed

from tests.cpu.lib.launched import OURS, ROOT, port, ran

pytest.importorskip("accelerate")

EXAMPLE = str(ROOT / "examples" / "accelerate_script.py")


def config(name: str) -> list[str]:
    return ["--config_file", str(ROOT / "configs" / name)]


def loss(printed: str) -> list[str]:
    return re.findall(r"loss ([\d.]+)", printed)


def test_one_process() -> None:
    planned = ran(*OURS, *config("accelerate_single.yaml"), "--cpu", EXAMPLE)
    assert planned.returncode == 0 and len(loss(planned.stdout)) == 1, planned.stderr
    assert planned.stdout.count("measured peak") == 1 and "40.00 MiB" in planned.stdout


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="no gloo")
def test_two_processes() -> None:
    planned = ran(*OURS, *config("accelerate_multi.yaml"), *port(), EXAMPLE, ACCELERATE_USE_CPU="true")
    assert planned.returncode == 0 and len(loss(planned.stdout)) == 1, planned.stderr
    assert planned.stdout.count("measured peak") == 1
