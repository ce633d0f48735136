"""Lightning strategies: thin adapters that hold a Session. Importing this package registers "memopt" and "memopt_ddp"."""

from lightning_memopt.strategies.ddp import MemOptDDPStrategy
from lightning_memopt.strategies.mixin import MemOptMixin
from lightning_memopt.strategies.single import MemOptStrategy, register

__all__ = ["MemOptDDPStrategy", "MemOptMixin", "MemOptStrategy", "register"]

register()
