"""transformers' Trainer (integrations/transformers.py, checkpointing.py): the bits of the Trainer without the callback."""
