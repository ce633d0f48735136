"""One training step as pure data: tensors, ops and saves on one axis of points. Needs no torch."""

from lightning_memopt.graph.fingerprint import fingerprint, first_difference
from lightning_memopt.graph.json_io import graph_from_json, graph_to_json
from lightning_memopt.graph.liveness import (
    RESIDENT,
    Levels,
    base_levels,
    resident_nbytes,
    resident_text,
    unmodified_levels,
    workspaces,
)
from lightning_memopt.graph.model import (
    BEFORE,
    CALL,
    COMPILED,
    HOOK,
    LATE_HOOK,
    OUTSIDE,
    UNRECORDED,
    EarlyUpdate,
    Graph,
    Op,
    Point,
    Save,
    Tensor,
    around,
    unpacks_of,
)

__all__ = [
    "BEFORE",
    "CALL",
    "COMPILED",
    "HOOK",
    "LATE_HOOK",
    "OUTSIDE",
    "UNRECORDED",
    "RESIDENT",
    "EarlyUpdate",
    "Graph",
    "Levels",
    "Op",
    "Point",
    "Save",
    "Tensor",
    "around",
    "base_levels",
    "fingerprint",
    "first_difference",
    "graph_from_json",
    "graph_to_json",
    "unpacks_of",
    "resident_nbytes",
    "resident_text",
    "unmodified_levels",
    "workspaces",
]
