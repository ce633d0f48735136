"""Lightning strategies: thin adapters that hold a Session. Users get these classes, over the base classes of their Lightning,
from `lightning_memopt` (lightnings.py in `integrations`).
"""

from lightning_memopt.strategies.mixin import MemOptMixin

__all__ = ["MemOptMixin"]
