"""Draw a comparison as one figure: step time and extra FLOPs over measured peak, one row per model. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from lightning_memopt.bench.catalogue import OURS, TITLES
from lightning_memopt.bench.tables import MIB

_MARKERS = "osv^D<>phX*dP8H"
_AXES = (("cpu_ratio", "step time (CPU), x unmodified"), ("extra_flops", "extra FLOPs, %"))


def draw(data: dict[str, Any], paths: Sequence[Path]) -> None:
    """Write the figure to each path, in the format of its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models: dict[str, dict[str, dict[str, Any]]] = data["models"]
    figure = Figure(figsize=(12, 4 * len(models) + 1))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(models), len(_AXES), squeeze=False)
    handles: dict[str, Any] = {}
    for (model, rows), pair in zip(models.items(), axes, strict=True):
        for ax, (key, title) in zip(pair, _AXES, strict=True):
            for number, name in enumerate(TITLES):
                points = sorted(_points(rows, name, key))
                if points:
                    colors = matplotlib.colormaps["Dark2" if name in OURS else "tab10"]
                    style: dict[str, Any] = {
                        "color": colors(number % colors.N),
                        "marker": _MARKERS[number % len(_MARKERS)],
                        "linestyle": "-" if name in OURS else "none",
                        "markersize": 5 if name in OURS else 7,
                    }
                    handles[TITLES[name]] = ax.plot(*zip(*points, strict=True), linewidth=1, **style)[0]
            ax.set_title(f"{model}: {title}", fontsize=10)
            ax.set_xlabel("peak above what is resident, MiB", fontsize=9)
            ax.set_xlim(left=0)
            ax.grid(alpha=0.3)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 1.2 / (4 * len(models) + 1), 1, 1))
    for path in paths:
        figure.savefig(path, dpi=90, metadata={"Date": None} if path.suffix == ".svg" else None)


def _points(rows: dict[str, dict[str, Any]], name: str, key: str) -> list[tuple[float, float]]:
    points = []
    for row in rows.values():
        if row["method"] == name and row["state"] == "measured":
            value = {"unmodified": 1.0}.get(name) if key == "cpu_ratio" and key not in row else row.get(key)
            if value is not None:
                y = 100 * value if key == "extra_flops" else value if isinstance(value, float) else value["median"]
                points.append((row["peak_nbytes"] / MIB, y))
    return points
