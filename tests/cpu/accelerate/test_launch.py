"""Unchanged scripts under the launchers: the bits of `accelerate launch`, the budget kept, arguments and exit codes alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_memopt.units import parse_budget
from tests.cpu.lib.launched import OURS, SCRIPTS, STOCK, ran, same

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def shown(table: str, row: str) -> int:
    """Bytes in a row of the printed table."""
    match = re.search(rf"│ {row} +│ ([\d.]+ \w+)", table)
    assert match is not None, table
    return parse_budget(match[1], 1 << 62)


def test_an_unchanged_script_keeps_its_budget_bit_by_bit(tmp_path: Path) -> None:
    """The stock launcher, ours with flags, and ours as a module under the stock launcher end with the same bits."""
    script = str(SCRIPTS / "nlp_example.py")
    outputs = {name: str(tmp_path / name) for name in ("plain", "ours", "module")}
    plain = ran(*STOCK, "--cpu", script, "--output", outputs["plain"])
    assert plain.returncode == 0 and "MemOpt" not in plain.stdout, plain.stderr
    ours = ran(*OURS, "--cpu", "--memopt_budget", "12MiB", "--memopt-profile-steps", "2", script, "--output", outputs["ours"])
    module = ran(*STOCK, "--cpu", "-m", "lightning_memopt.launch", "--budget", "12MiB", script, "--output", outputs["module"])
    expected = torch.load(f"{outputs['plain']}.0")
    for name, done in (("ours", ours), ("module", module)):
        assert done.returncode == 0, done.stderr
        assert same(torch.load(f"{outputs[name]}.0"), expected)
        assert done.stdout.count("measured peak") == 1
        measured, predicted = (shown(done.stdout, row) for row in ("measured peak", "predicted peak"))
        assert measured <= parse_budget("12MiB", 1 << 62) < shown(done.stdout, "unmodified peak")
        assert abs(measured - predicted) <= 0.01 * predicted
