"""Lightning's Trainer (lightning_memopt/strategies): callbacks, optimizers, precisions, copies, resuming."""
