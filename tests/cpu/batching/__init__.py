"""Batch sizes (lightning_memopt/batching, callbacks/batch_scaler.py): fitted, searched for, and all that a search puts back."""
