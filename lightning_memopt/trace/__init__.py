"""Observe one real training step through the recorder, and build its `Graph`."""

from lightning_memopt.trace.backwards import backward_runs
from lightning_memopt.trace.counted import Ledger
from lightning_memopt.trace.gathered import Gathered
from lightning_memopt.trace.in_place import InPlace
from lightning_memopt.trace.living import count_all, counting_all
from lightning_memopt.trace.memory import AllocatorEvents, metered_cpu
from lightning_memopt.trace.resident import adopt_all
from lightning_memopt.trace.rest import Rest
from lightning_memopt.trace.scopes import Scopes
from lightning_memopt.trace.tracer import Tracer
from lightning_memopt.trace.unrecorded import generated_code, unrecorded_op

__all__ = [
    "AllocatorEvents",
    "Gathered",
    "InPlace",
    "Ledger",
    "Rest",
    "Scopes",
    "Tracer",
    "backward_runs",
    "count_all",
    "counting_all",
    "generated_code",
    "metered_cpu",
    "unrecorded_op",
    "adopt_all",
]
