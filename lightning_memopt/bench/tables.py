"""A comparison as text: a line of progress for each row, and the Markdown page."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from lightning_memopt.bench.catalogue import OURS, TITLES
from lightning_memopt.bench.results import Rows
from lightning_memopt.bench.rows import MIB, Row

_HEAD = ("method", "budget", "peak, MiB", "extra FLOPs", "CPU time", "wall time", "bits", "remarks")


def progress(model: str, number: int, count: int, label: str, row: Row) -> str:
    """One line about a row that was measured."""
    where = f"{model} {number}/{count}" if count else model
    if row["state"] != "measured":
        return f"{where}  {label}: {row['state']}: {row['reason']}"
    cells = [f"{_mib(row)} MiB"]
    if "cpu_ratio" in row:
        cells += [f"{_flops(row)} FLOPs", f"{_ratio(row, 'cpu_ratio')} CPU time", f"{_ratio(row, 'wall_ratio')} wall time"]
        cells += [f"in {row['seconds']:.0f} s"]
    return f"{where}  {label}: {', '.join(cells)}; bits: {row['exact']}"


def page(data: dict[str, Any]) -> str:
    """The whole comparison as Markdown."""
    asked, machine = data["asked"], data["machine"]
    lines = [
        "# Comparison",
        "",
        f"{machine['device']}, {machine['processors']} processors, torch {machine['torch']}, {asked['threads'] or 'all'} "
        f"threads, {asked['rounds']} rounds. Peaks are above the bytes that are in memory between steps; a budget of 40 % is "
        "that share of the unmodified peak. Times are medians of paired ratios to the unmodified step, with quartiles. Extra "
        "FLOPs of ours are those of the ops that the plan runs again, of torch's compiled rows those of the graphs; of others "
        "they are counted while the step runs. Bits: of loss, gradients and buffers, against the unmodified step.",
    ]
    for model, rows in data["models"].items():
        lines += ["", f"## {model}", "", *summary(rows), "", "Every row:", "", *model_table(rows)]
    return "\n".join(lines) + "\n"


def summary(rows: Rows) -> list[str]:
    """A table of each method and ours at its peak, and the cases in which ours takes more."""
    short = table_at_peaks(rows)
    return [*(["Each method, and the better of our plans at its peak:", "", *short, ""] if short else []), *verdict(rows)]


def model_table(rows: Rows) -> list[str]:
    """A line for each row: by method, and by budget within it."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for name in TITLES:
        for row in (row for row in rows.values() if row["method"] == name):
            lines.append("| " + " | ".join(_cells(row)) + " |")
    return lines


def _cells(row: Row) -> list[str]:
    title = [TITLES[row["method"]], row["budget"]]
    if row["state"] != "measured":
        return [*title, "", "", "", "", "", f"{row['state']}: {_cell(row['reason'])}"]
    times = [_ratio(row, "cpu_ratio", True), _ratio(row, "wall_ratio", True)]
    return [*title, _mib(row), _flops(row), *times, row["exact"], _cell(row.get("note", ""))]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _mib(row: Row) -> str:
    return f"{row['peak_nbytes'] / MIB:.1f}"


def _flops(row: Row) -> str:
    return "" if row.get("extra_flops") is None else f"{100 * row['extra_flops']:+.1f} %"


def _ratio(row: Row, key: str, spread: bool = False) -> str:
    if key not in row:
        return ""
    ratio = row[key]
    quartiles = f" ({ratio['low']:.2f} to {ratio['high']:.2f})" if spread else ""
    return f"x{ratio['median']:.2f}{quartiles}"


# -- ours at the peaks of the others -------------------------------------------------------------------


class AtPeaks(NamedTuple):
    """The other methods of a model, and our plans at the peak of each.

    compared: label of another method -> (its row, our measured rows at its peak, or the refused ones if none was measured).
    left: labels of methods at whose peak none of our plans ran.
    high: labels of methods whose peak is not lower than that of the unmodified step.
    """

    compared: dict[str, tuple[Row, list[Row]]]
    left: list[str]
    high: list[str]


def matched_at_peaks(rows: Rows) -> AtPeaks:
    """Match our plans to the other methods of a model at whose peaks they ran."""
    ours: dict[str, list[Row]] = {}
    for row in rows.values():
        if row.get("at"):
            ours.setdefault(row["at"], []).append(row)
    ran = {label: row for label, row in rows.items() if row["method"] not in OURS and row["state"] == "measured"}
    whole = ran.pop("unmodified", {}).get("peak_nbytes", 0)
    peaks = {row["peak_nbytes"]: label for label, row in reversed(ran.items())}  # several may have the same
    there = {label: ours.get(peaks[row["peak_nbytes"]], []) for label, row in ran.items() if row["peak_nbytes"] < whole}
    measured = {label: [row for row in mine if row["state"] == "measured"] or mine for label, mine in there.items()}
    return AtPeaks(
        compared={label: (ran[label], mine) for label, mine in measured.items() if mine},
        left=[label for label, mine in measured.items() if not mine],
        high=[label for label in ran if label not in there],
    )


def table_at_peaks(rows: Rows) -> list[str]:
    """A line for each method: what it takes, and what the better of our plans at its peak takes. Empty without any."""
    head = ("method", "peak, MiB", "extra FLOPs", "ours", "CPU time", "ours", "wall time", "ours", "its bits")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for label, (row, mine) in matched_at_peaks(rows).compared.items():
        cells = [label, _mib(row), _flops(row), _flops(min(mine, key=_extra_flops))]
        for key in ("cpu_ratio", "wall_ratio"):
            cells += [_ratio(row, key), _ratio(min(mine, key=partial(_median, key)), key)]
        lines.append("| " + " | ".join([*cells, row["exact"]]) + " |")
    return lines if len(lines) > 2 else []


def verdict(rows: Rows) -> list[str]:
    """The cases in which the better of our plans at the peak of another method takes more than that method."""
    compared, left, high = matched_at_peaks(rows)
    behind = [f"- {label}: {text}" for label, (row, mine) in compared.items() for text in _behind(row, mine)]
    lines = []
    if compared:
        said = "Not ahead of:" if behind else "It has no more extra FLOPs, and takes less time, than any of them."
        lines += [f"Ours at the peak of {', '.join(compared)}, by the better of its plans. {said}", ""]
        lines += [*behind, ""] if behind else []
    if left:
        lines += [f"No plan of ours was run at the peak of {', '.join(left)}.", ""]
    if high:
        lines += [f"No lower peak than unmodified: {', '.join(high)}.", ""]
    return lines[:-1]


def _extra_flops(row: Row) -> float:
    """The extra FLOPs of a row; infinite if it has none."""
    extra = row.get("extra_flops")
    return float("inf") if extra is None else float(extra)


def _median(key: str, row: Row) -> float:
    return float(row[key]["median"]) if key in row else float("inf")


def _behind(row: Row, mine: list[Row]) -> list[str]:
    """Sentences on where our best plan at this peak is not better."""
    if mine[0]["state"] != "measured":
        return [f"ours {mine[0]['state']}: {mine[0]['reason']}"]
    said = []
    bits = "" if row["exact"] == "equal" else f"; its bits: {row['exact']}"
    fewest = min(mine, key=_extra_flops)
    if _extra_flops(fewest) > _extra_flops(row):
        said.append(f"extra FLOPs: {_flops(row)}, ours {_flops(fewest)}{bits}")
    for key, name in (("cpu_ratio", "CPU time"), ("wall_ratio", "wall time")):
        best = min(mine, key=partial(_median, key))
        if best[key]["median"] >= row[key]["median"]:
            near = ", within the quartiles" if best[key]["low"] <= row[key]["high"] else ""
            said.append(f"{name}: {_ratio(row, key)}, ours {_ratio(best, key)}{near}{bits}")
    return said
