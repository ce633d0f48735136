"""Lightning Fabric strategies: `Fabric(strategy=MemOptFabricStrategy(budget="8GiB"))`. Users get these classes, over the base
classes of their Lightning, from `lightning_memopt` (lightnings.py in `integrations`).
"""
