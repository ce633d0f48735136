"""What is recorded of FSDP2: exact, within the peak of checkpointing with fewer FLOPs, and as predicted."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from benchmarks.recompute.fsdp2 import FILE, KINDS, table

RECORDED = json.loads(FILE.read_text())
CASES = [(world, name) for world, of_models in RECORDED.items() for name in of_models]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_recorded(world: str, name: str) -> None:
    rows = RECORDED[world][name]
    assert len(rows) == int(world)
    for row in rows:
        assert row["within"]["peak_nbytes"] <= row["checkpointed"]["peak_nbytes"] < row["plain"]["peak_nbytes"]
        assert row["min"]["peak_nbytes"] <= row["within"]["peak_nbytes"]
        for kind in KINDS[2:]:
            assert row[kind]["hash"] == row["plain"]["hash"]
            assert row["within"]["extra_flops"] < row["checkpointed"]["extra_flops"]
            assert row[kind]["peak_nbytes"] == pytest.approx(row[kind]["predicted_nbytes"], rel=0.01)


def test_table() -> None:
    lines = table(RECORDED).splitlines()
    assert len(lines) == 2 + len(CASES) and not any("NO" in line for line in lines)
