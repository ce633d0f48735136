"""Which tensors may be parked in which tier and form, the plans that park, and the tiers of the plans in force.

Enter through `Offloading` (offloading.py).
"""
