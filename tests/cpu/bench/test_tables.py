"""The page of a comparison: ours at the peak of each other method, and every case in which ours takes more."""

from __future__ import annotations

from typing import Any

from lightning_memopt.bench.rows import MIB
from lightning_memopt.bench.tables import page, table_at_peaks, verdict


def row(method: str, mib: float, flops: float | None = 0.0, cpu: float = 1.0, wall: float = 1.0, **more: Any) -> dict[str, Any]:
    spread = {key: {"low": ratio, "median": ratio, "high": ratio} for key, ratio in (("cpu_ratio", cpu), ("wall_ratio", wall))}
    measured = {"state": "measured", "peak_nbytes": int(mib * MIB), "extra_flops": flops, "exact": "equal"} | spread
    return {"method": method, "budget": ""} | measured | more


WHOLE = {"unmodified": row("unmodified", 100)}
BLOCKS = {"per-block": row("per-block", 40, 0.3, 1.4, 1.5)}


def test_each_number_is_that_of_the_plan_that_is_best_at_it() -> None:
    ours = {
        "ours": row("ours", 39, 0.2, 1.2, 1.3, at="per-block"),
        "ours-flops": row("ours-flops", 38, 0.1, 1.3, 1.2, at="per-block"),
    }
    assert table_at_peaks(WHOLE | BLOCKS | ours)[2:] == [
        "| per-block | 40.0 | +30.0 % | +10.0 % | x1.40 | x1.20 | x1.50 | x1.20 | equal |"
    ]
    (line,) = verdict(WHOLE | BLOCKS | ours)
    assert line.endswith("It has no more extra FLOPs, and takes less time, than any of them.")


def test_what_ours_does_not_beat_is_named() -> None:
    ours = {"ours": row("ours", 39, 0.4, 1.2, 1.5, at="per-block")}
    lines = verdict(WHOLE | BLOCKS | ours)
    assert "- per-block: extra FLOPs: +30.0 %, ours +40.0 %" in lines
    assert "- per-block: wall time: x1.50, ours x1.50, within the quartiles" in lines
    assert not any("CPU time" in line for line in lines)


def test_methods_with_the_same_peak_share_our_plan_there() -> None:
    rows = WHOLE | BLOCKS | {"transformers": row("transformers", 40, 0.3, 1.3, 1.3), "ours": row("ours", 39, at="per-block")}
    assert [line.split(" | ")[0] for line in table_at_peaks(rows)[2:]] == ["| per-block", "| transformers"]


def test_refused_plans_high_peaks_and_unknown_flops() -> None:
    refused = {"ours": {"method": "ours", "budget": "", "state": "refused", "reason": "no plan fits", "at": "per-block"}}
    rows = WHOLE | BLOCKS | {"save-on-cpu": row("save-on-cpu", 100)} | refused
    assert table_at_peaks(rows)[2:] == ["| per-block | 40.0 | +30.0 % |  | x1.40 |  | x1.50 |  | equal |"]
    assert "- per-block: ours refused: no plan fits" in verdict(rows)
    assert "No lower peak than unmodified: save-on-cpu." in verdict(rows)
    unknown = {"per-block": row("per-block", 40, None, 1.4, 1.5), "ours": row("ours", 39, None, at="per-block")}
    assert not any("extra FLOPs:" in line for line in verdict(WHOLE | unknown))


def test_a_model_without_other_methods_has_no_short_table() -> None:
    data = {
        "asked": {"threads": 1, "rounds": 2},
        "machine": {"device": "x86_64", "processors": 2, "torch": "2.13.0"},
        "models": {"net": WHOLE},
    }
    assert table_at_peaks(WHOLE) == [] and "Each method" not in page(data) and "Every row:" in page(data)
