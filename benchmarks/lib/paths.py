"""Where the repository is, and where commands write what they measured."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
