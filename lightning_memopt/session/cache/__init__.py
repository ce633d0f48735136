"""The state of each signature: which plan serves it, from which it borrows, and whether one more may be made.

Enter through `PlanCache` (plan_cache.py).
"""
