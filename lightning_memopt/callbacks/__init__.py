"""Lightning callbacks: thin adapters around `batching` and `telemetry`, which work in any loop."""

from lightning_memopt.callbacks.batch_scaler import MemOptBatchScaler
from lightning_memopt.callbacks.monitor import MemOptMonitor

__all__ = ["MemOptBatchScaler", "MemOptMonitor"]
