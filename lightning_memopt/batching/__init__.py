"""A batch size that fits, from two traces: fit, choose, confirm. Fronts: `find_max_batch_size` and `MemOptBatchScaler`."""

from lightning_memopt.batching.batches import FromFunction, FromLoader, refuse_loader
from lightning_memopt.batching.choose import MODES, Mode
from lightning_memopt.batching.found import Found
from lightning_memopt.batching.oom import is_out_of_memory
from lightning_memopt.batching.search import Search
from lightning_memopt.batching.untouched import Snapshot, untouched

__all__ = [
    "MODES",
    "Found",
    "FromFunction",
    "FromLoader",
    "Mode",
    "Search",
    "Snapshot",
    "is_out_of_memory",
    "refuse_loader",
    "untouched",
]
