"""The front for Accelerate: `lightning_memopt.accelerate.prepare(accelerator, model, optimizer, loader, budget="8GiB")`."""

from lightning_memopt.integrations.accelerate import prepare

__all__ = ["prepare"]
