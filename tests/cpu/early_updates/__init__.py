"""Early updates (lightning_memopt/runtime/early_updates.py): updates in backward, in a Trainer and in plain loops."""
