"""Find a batch size that fits a memory budget: observe two small sizes, predict all others, confirm one by real steps.

Users call it through `find_max_batch_size` (plain PyTorch) or `MemOptBatchScaler` (Lightning). `search.py` is the entry.
"""

from lightning_memopt.batching.batches import FromFunction, FromLoader, refuse_loader
from lightning_memopt.batching.choose import MODES, Mode
from lightning_memopt.batching.oom import is_out_of_memory
from lightning_memopt.batching.result import BatchSizeResult
from lightning_memopt.batching.search import Search
from lightning_memopt.batching.untouched import Snapshot, untouched

__all__ = [
    "MODES",
    "BatchSizeResult",
    "FromFunction",
    "FromLoader",
    "Mode",
    "Search",
    "Snapshot",
    "is_out_of_memory",
    "refuse_loader",
    "untouched",
]
