"""Lightning strategies: thin adapters that hold a Session. Importing this package registers `strategy="memopt"`."""

from lightning_memopt.strategies.mixin import MemOptMixin
from lightning_memopt.strategies.single import MemOptStrategy, register

__all__ = ["MemOptMixin", "MemOptStrategy", "register"]

register()
