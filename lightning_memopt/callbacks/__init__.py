"""Lightning callbacks: thin adapters around `batching` and `telemetry`, which work in any loop. Users get these classes, over
the base class of their Lightning, from `lightning_memopt` (lightnings.py in `integrations`).
"""
