"""Regions that torch.compile made: read, and compiled again as their plans say."""

from lightning_memopt.compiled.halves import Halves
from lightning_memopt.compiled.partitioner import Region, Regions, compiles

__all__ = ["Halves", "Region", "Regions", "compiles"]
