"""Lightning Fabric strategies: `Fabric(strategy=MemOptFabricStrategy(budget="8GiB"))`. Importing this package registers the
strategies "memopt" and "memopt_ddp" with Fabric.
"""

from lightning_memopt.fabric.strategies import MemOptFabricDDPStrategy, MemOptFabricMixin, MemOptFabricStrategy, register

__all__ = ["MemOptFabricDDPStrategy", "MemOptFabricMixin", "MemOptFabricStrategy", "register"]

register()
