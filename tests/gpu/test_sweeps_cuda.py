"""The CPU's exactness sweeps over torch's own tables on CUDA, in float32 and bfloat16, under deterministic algorithms."""

from __future__ import annotations

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from tests.cpu.lib.sweeps import Count, assert_none_differs, sweep
from tests.cpu.record.test_module_db import module_db, sweep_module
from tests.cpu.record.test_op_db import op_db, sweep_op
from tests.cpu.record.test_op_db_planned import sweep_planned

PARTS = 8
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _reports(count: Count) -> None:
    print(f"equal with something dropped {len(count.dropped)}, nothing droppable {len(count.nothing)}, "
          f"not comparable {len(count.skipped)}")  # fmt: skip
    assert_none_differs(count)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_operator_differs(part: int, dtype: str) -> None:
    count = sweep(op_db[part::PARTS], partial(sweep_op, device="cuda", wanted={TYPES[dtype]: 2}))
    _reports(count)
    assert len(count.dropped) >= 20


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_operator_differs_in_planned_steps(part: int, dtype: str) -> None:
    count = sweep(op_db[part::PARTS], partial(sweep_planned, device="cuda", dtype=TYPES[dtype], most=1))
    _reports(count)
    assert len(count.dropped) >= 20


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("part", range(4))
def test_no_module_differs(part: int, dtype: str) -> None:
    count = sweep(module_db[part::4], partial(sweep_module, device="cuda", dtype=TYPES[dtype], most=6))
    _reports(count)
    assert len(count.dropped) >= 10
