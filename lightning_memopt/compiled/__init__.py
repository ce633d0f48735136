"""Regions that torch.compile made: how they are read and compiled again as their plans say, and the order of their kernels."""

from lightning_memopt.compiled.halves import Halves
from lightning_memopt.compiled.kernels import Kernels, asked_to_order
from lightning_memopt.compiled.partitioner import Region, Regions, compiles

__all__ = ["Halves", "Kernels", "Region", "Regions", "asked_to_order", "compiles"]
