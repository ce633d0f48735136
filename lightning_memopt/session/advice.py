"""What a user may do where no plan lowers the peak: what is there at that moment, and two things that would lower it."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.peak import Breakdown, at_peak
from lightning_memopt.units import format_nbytes

_SHOWN = 3
"""Structures, and remedies less one, that are named."""
_SAVED = ("feature maps", "held to rebuild", "rebuilt")
_PASSING = ("in use", "workspace")
_NOWHERE = ("*", "backward")
"""What says nothing of where bytes are: one of a list of layers, and all that backward makes."""


def advice(graph: Graph, lives: Iterable[Life], config: MemOptConfig) -> str:
    """Two sentences: the largest structures at the peak of a plan, each with its largest layer; what would lower them."""
    found = at_peak(graph, lives)
    parts = []
    for structure, nbytes in found.by(1).most_common(_SHOWN):
        layer = max((key for key in found.nbytes if key[1] == structure), key=found.nbytes.__getitem__)[0]
        where = "" if layer in (structure, *_NOWHERE) else f" (most in {layer})"
        parts.append(f"{structure} {format_nbytes(nbytes)}{where}")
    return f"At the peak: {', '.join(parts)}. To lower it: {', or '.join(remedies(graph, found, config))}."


def remedies(graph: Graph, found: Breakdown, config: MemOptConfig) -> list[str]:
    """At most two that apply, the one for the most bytes first."""
    nbytes = found.by(1)
    updates = sum(n for (layer, structure), n in found.nbytes.items() if layer == "update" and structure in _PASSING)
    saved = sum(nbytes[s] for s in _SAVED)
    kinds = [kind for kind in ("_foreach_", "_fused_") if any(o.phase == "update" and kind in o.name for o in graph.ops)]
    offers = [
        (updates * (kinds == ["_foreach_"]), "foreach=False in the optimizer"),
        (updates * (not kinds), "fused=True in the optimizer"),
        (nbytes["gradients"] * (config.optimizer_in_backward == "never"), "optimizer_in_backward='auto'"),
        (saved * (not config.recompute), "recompute=True"),
        (saved * (config.offload == "none"), f"offload={'disk' if graph.device == 'cpu' else 'auto'!r}"),
        (saved + nbytes["inputs"] + sum(nbytes[s] for s in _PASSING) - updates, "a smaller batch"),
    ]
    chosen = [text for n, text in sorted(offers, key=lambda offer: -offer[0]) if n > 0]
    return chosen[: _SHOWN - 1] or ["a smaller model"]
