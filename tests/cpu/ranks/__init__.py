"""Ranks that train together (lightning_memopt/ranks, session/ranks): meetings, one plan for all, failures with names."""
