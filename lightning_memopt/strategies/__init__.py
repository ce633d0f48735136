"""Lightning strategies: thin adapters that hold a Session. Importing this package registers "memopt", "memopt_ddp" and
"memopt_fsdp2".
"""

from lightning_memopt.strategies.ddp import MemOptDDPStrategy
from lightning_memopt.strategies.mixin import MemOptMixin
from lightning_memopt.strategies.model_parallel import MemOptModelParallelStrategy
from lightning_memopt.strategies.single import MemOptStrategy, register

__all__ = [
    "MemOptDDPStrategy",
    "MemOptMixin",
    "MemOptModelParallelStrategy",
    "MemOptStrategy",
    "register",
]

register()
