"""Recomputation: time and quality of the chain solver and of Echo's analysis, and the frontier of plans, executed."""
