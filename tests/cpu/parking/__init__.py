"""Parking (lightning_memopt/runtime/parked.py, tiers and codecs): tensors that are moved out or encoded, and come back."""
