"""Ranks that train together (lightning_memopt/ranks, session/agreement.py): meetings, one plan for all, failures with names."""
