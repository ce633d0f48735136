"""Tiers for offloaded bytes: page-locked host memory, and a file. They move whole storages; a plan says which, and when."""

from lightning_memopt.runtime.tiers.base import Stored, Tier
from lightning_memopt.runtime.tiers.disk import DiskTier
from lightning_memopt.runtime.tiers.host import HostTier
from lightning_memopt.runtime.tiers.space import Space
from lightning_memopt.runtime.tiers.stopwatch import Stopwatch

__all__ = ["DiskTier", "HostTier", "Space", "Stopwatch", "Stored", "Tier"]
