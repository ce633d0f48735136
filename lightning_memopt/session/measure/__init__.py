"""What the allocator says of a whole step, and of what is in memory between two steps.

Enter through `Metering` (peak_meter.py).
"""
