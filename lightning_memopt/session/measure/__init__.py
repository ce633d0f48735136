"""What the allocator says of a whole step, and of what is in memory between two steps.

Door: `Metering` (peak_meter.py).
"""
