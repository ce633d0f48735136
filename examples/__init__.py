"""Short programs that show one thing each. Run one with `python -m examples.NAME` from the root of a clone.

| name | shows |
|---|---|
| `plain_loop` | a plain PyTorch loop within a budget |
| `lightning_trainer` | the same model in a Lightning Trainer |
| `accelerate_script` | a script for Accelerate that its launcher keeps within a budget |
| `batch_size` | the largest batch size that fits a budget |
| `offload_disk` | saved tensors parked on a disk, for budgets below what recomputation reaches |
| `plan_offline` | a plan saved by one run, made smaller without the model, used by another run |
| `digits` | a ResNet trained on handwritten digits |
| `chargpt` | a character GPT trained on the standard library's source |
| `demo` | both trainings within budgets, beside the plain run: what `memopt demo` runs |

`digits`, `chargpt` and `demo` need `pip install '.[demo]'`, `lightning_trainer` needs `pip install '.[lightning]'`, and
`accelerate_script` needs `pip install '.[accelerate]'`. Nothing is downloaded, and two CPU cores are enough.
`training` has what `digits` and `chargpt` share.
"""
