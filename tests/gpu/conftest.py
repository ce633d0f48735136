"""All of this runs under deterministic algorithms on the first CUDA device; without one, each file skips itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["MEMOPT_CACHE"] = "0"  # no test begins with the plans of another one
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
