"""What `frontier.py` measured, as text, as the README's tables, and as one plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Cell = Callable[[dict[str, Any]], str]


def _mib(key: str) -> Cell:
    return lambda p: f"{p[key]:.1f}" if key in p else ""


def _percent(key: str) -> Cell:
    return lambda p: f"{100 * p[key]:.0f} %" if key in p else ""


def _ratio(p: dict[str, Any]) -> str:
    return f"{p['time_ratio']:.2f} ({p['cpu_ratio']:.2f})" if "time_ratio" in p else ""


def _predicted_ratio(p: dict[str, Any]) -> str:
    return f"{p['predicted_ratio']:.2f}" if "predicted_ratio" in p else ""


COLUMNS: dict[str, Cell] = {
    "budget": _mib("budget_mib"),
    "predicted": _mib("predicted_mib"),
    "measured": _mib("peak_mib"),
    "extra FLOPs": _percent("extra_flops"),
    "rebuilt": lambda p: f"{p['rebuilt_mib']:.0f}" if "rebuilt_mib" in p else "",
    "time, predicted": _predicted_ratio,
    "measured (CPU)": _ratio,
    "equal": lambda p: "yes" if p.get("equal") else "NO",
}


def _refused(point: dict[str, Any]) -> str | None:
    if "infeasible" in point:
        return f"refused: smallest {point['smallest_mib']:.1f}"
    return point.get("failed")


def print_points(name: str, result: Result) -> None:
    """Every point of one model, aligned; bytes in MiB above what is resident."""
    print(
        f"\n{name}: {result['points']['unmodified']['peak_mib']:.1f} MiB above resident "
        f"({100 * result['activation_share']:.0f} % of the peak), {result['ops']} ops, "
        f"{len(result['frontier'])} plans in {result['solve_seconds']:.1f} s"
    )
    print(f"  {'':30}" + "".join(f"{title:>16}" for title in COLUMNS))
    for label, point in result["points"].items():
        note = _refused(point)
        cells = f"  {note}" if note else "".join(f"{cell(point):>16}" for cell in COLUMNS.values())
        kept = "" if point.get("within_budget", True) else "  ABOVE ITS BUDGET"
        print(f"  {label:30}{cells}{kept}")


def print_tables(results: dict[str, Result]) -> None:
    """Markdown: a line a model, then a line a point of ours and of per-block checkpointing, and how far predictions are off."""
    print(
        "| model | activations | unmodified | per block | its extra FLOPs, time | ours there "
        "| fewest FLOPs there | smallest | refused f | exact |"
    )
    print("|" + "---|" * 10)
    for name, result in results.items():
        print("| " + " | ".join(_summary(name, result)) + " |")
    titles = [title for title in COLUMNS if title != "equal"]
    print("\n| model | | " + " | ".join(titles) + " |\n|" + "---|" * (2 + len(titles)))
    for name, result in results.items():
        for label, point in result["points"].items():
            if label.startswith(("unmodified", "per block", "ours")):
                cells = [f"**{COLUMNS[t](point)}**" if t == "measured" else COLUMNS[t](point) for t in titles]
                note = _refused(point)
                cells = [note, *[""] * (len(titles) - 1)] if note else cells
                label += "" if note or point["equal"] else " (other bits)"
                print(f"| {result.get('title', name)} | {label} | " + " | ".join(cells) + " |")
    errors = [abs(p["prediction_error"]) for r in results.values() for p in r["points"].values() if "prediction_error" in p]
    print(f"\nPredicted peaks of {len(errors)} plans are within {100 * max(errors):.4f} % of the measured ones.")


def _summary(name: str, result: Result) -> list[str]:
    points = result["points"]
    block, there = points["per block"], points["ours at per-block peak"]
    ours = [p for label, p in points.items() if label.startswith(("ours", "fewest")) and "infeasible" not in p]
    refused = [k.removeprefix("ours f=") for k, p in points.items() if k.startswith("ours f=") and "infeasible" in p]

    def price(p: dict[str, Any]) -> str:
        took = f", x{p['cpu_ratio']:.2f}" if "cpu_ratio" in p else ""
        return _refused(p) or f"{100 * p['extra_flops']:.0f} %{took}"

    return [
        result.get("title", name),
        f"{100 * result['activation_share']:.0f} %",
        f"{points['unmodified']['peak_mib']:.1f}",
        f"{block['peak_mib']:.1f}",
        price(block),
        price(there),
        price(points["fewest FLOPs at per-block peak"]),
        f"{points['ours smallest']['peak_mib']:.1f}",
        ", ".join(refused) or "none",
        "yes" if all(p["equal"] and p["within_budget"] for p in ours) else "NO",
    ]


_STYLES = {"ours": "C0o-", "fewest FLOPs": "C1v:", "per block": "C2s", "torch budget": "C3^", "unmodified": "k*"}


def plot(results: dict[str, Result], path: Path) -> None:
    """One figure: for every model, step time and extra FLOPs over the measured peak, side by side; three models a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    across = min(3, len(results))
    rows = -(-len(results) // across)
    figure, axes = plt.subplots(rows, 2 * across, figsize=(7.2 * across, 2.7 * rows), squeeze=False)
    for ax in axes.flat[2 * len(results) :]:
        ax.axis("off")
    for i, (name, result) in enumerate(results.items()):
        for column, (key, label) in enumerate((("time_ratio", "step time, x"), ("extra_flops", "extra FLOPs, share"))):
            ax = axes.flat[2 * i + column]
            for group, style in _STYLES.items():
                points = [p for n, p in result["points"].items() if n.startswith(group) and key in p]
                xy = sorted((p["peak_mib"], p[key]) for p in points)
                if xy:
                    ax.plot(*zip(*xy, strict=True), style, label=group, markersize=5, linewidth=1)
            ax.set_title(f"{result.get('title', name)}: {label}", fontsize=9)
            ax.set_xlim(left=0)
            ax.tick_params(labelsize=8)
            ax.grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.suptitle("measured peak above what is resident, MiB (across)", y=0.005, fontsize=9, va="bottom")
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=len(handles), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.03 if rows < 3 else 0.015, 1, 0.93 if rows == 1 else 0.975))
    figure.savefig(path, dpi=90)
    plt.close(figure)


__all__ = ["plot", "print_points", "print_tables"]
