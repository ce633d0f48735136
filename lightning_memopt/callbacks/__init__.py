"""Lightning callbacks: thin adapters over what works in any loop."""

from lightning_memopt.callbacks.batch_scaler import MemOptBatchScaler
from lightning_memopt.callbacks.monitor import MemOptMonitor

__all__ = ["MemOptBatchScaler", "MemOptMonitor"]
