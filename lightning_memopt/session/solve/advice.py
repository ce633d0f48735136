"""Advice for a user where no plan lowers the peak: the largest structures at the peak, and two changes that would lower it."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.peak import Breakdown, at_peak
from lightning_memopt.units import format_nbytes

_SHOWN = 3
"""Number of structures that are named. One remedy less is named."""
_SAVED = ("feature maps", "held to rebuild", "rebuilt")
_PASSING = ("in use", "workspace")
_NOWHERE = ("*", "backward")
"""Layers that do not tell where bytes are: one of a list of layers, and everything that backward makes."""


def advice(graph: Graph, lives: Iterable[Life], config: MemOptConfig) -> str:
    """Two sentences: the largest structures at the peak of a plan, each with its largest layer, and how to lower them."""
    breakdown = at_peak(graph, lives)
    parts = []
    for structure, nbytes in breakdown.by(1).most_common(_SHOWN):
        layer = max((key for key in breakdown.nbytes if key[1] == structure), key=breakdown.nbytes.__getitem__)[0]
        where = "" if layer in (structure, *_NOWHERE) else f" (most in {layer})"
        parts.append(f"{structure} {format_nbytes(nbytes)}{where}")
    return f"At the peak: {', '.join(parts)}. To lower it: {', or '.join(remedies(graph, breakdown, config))}."


def remedies(graph: Graph, breakdown: Breakdown, config: MemOptConfig) -> list[str]:
    """At most two remedies that apply, the one for the most bytes first."""
    nbytes = breakdown.by(1)
    updates = sum(n for (layer, structure), n in breakdown.nbytes.items() if layer == "update" and structure in _PASSING)
    saved = sum(nbytes[s] for s in _SAVED)
    kinds = [kind for kind in ("_foreach_", "_fused_") if any(o.phase == "update" and kind in o.name for o in graph.ops)]
    tier = "disk" if kind_of(graph.device).is_host else "auto"
    batch = saved + nbytes["logits"] + nbytes["inputs"] + sum(nbytes[s] for s in _PASSING) - updates
    offers = [
        (kinds == ["_foreach_"], updates, "foreach=False in the optimizer"),
        (not kinds, updates, "fused=True in the optimizer"),
        (config.optimizer_in_backward == "never", nbytes["gradients"], "optimizer_in_backward='auto'"),
        (not config.recompute, saved, "recompute=True"),
        (config.offload == "none", saved, f"offload={tier!r}"),
        (True, nbytes["logits"], "a loss that takes the logits in chunks"),
        (True, batch, "a smaller batch"),
    ]
    applying = [(lowered_nbytes, text) for applies, lowered_nbytes, text in offers if applies and lowered_nbytes > 0]
    chosen = [text for _, text in sorted(applying, key=lambda offer: -offer[0])]
    return chosen[: _SHOWN - 1] or ["a smaller model"]
