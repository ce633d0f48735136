"""The front for Accelerate: `lightning_memopt.accelerate.prepare(accelerator, model, optimizer, loader, budget="8GiB")`."""

from lightning_memopt.integrations.accelerate import prepare
from lightning_memopt.integrations.accelerate_batch_size import find_max_batch_size

__all__ = ["find_max_batch_size", "prepare"]
