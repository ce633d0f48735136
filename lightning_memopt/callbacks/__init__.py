"""Lightning callbacks: thin adapters around `batching` and `telemetry`, which work in any loop."""

from lightning_memopt.callbacks.batch_scaler import MemOptBatchScaler
from lightning_memopt.callbacks.monitor import MemOptMonitor
from lightning_memopt.callbacks.upgrade import MemOptCallback

__all__ = ["MemOptBatchScaler", "MemOptCallback", "MemOptMonitor"]
