"""Short programs that show one thing each. Run one with `python -m examples.NAME` from the root of a clone.

| name | shows |
|---|---|
| `plain_loop` | a plain PyTorch loop within a budget |
| `lightning_trainer` | the same model in a Lightning Trainer |
| `lightning_cli` | the same with LightningCLI: everything in a file of configs/, or in flags |
| `fabric_loop` | the same in a loop of Lightning Fabric |
| `ddp_torchrun` | DistributedDataParallel: `torchrun --nproc_per_node 2 examples/ddp_torchrun.py` |
| `fsdp2_torchrun` | weights sharded over processes: `torchrun --nproc_per_node 2 examples/fsdp2_torchrun.py` |
| `transformers_trainer` | a GPT-2 in transformers' Trainer, its gradient checkpointing replaced by the plan |
| `peft_lora` | adapters of a Llama, trained by transformers' Trainer and PEFT |
| `accelerate_script` | a script for Accelerate that its launcher keeps within a budget |
| `batch_size` | the largest batch size that fits a budget |
| `offload_disk` | saved tensors parked on a disk, for budgets below what recomputation reaches |
| `plan_offline` | a plan saved by one run, made smaller without the model, used by another run |
| `digits` | a ResNet trained on handwritten digits |
| `chargpt` | a character GPT trained on the standard library's source |
| `demo` | both trainings within budgets, beside the plain run: what `memopt demo` runs |

They need `pip install '.[demo]'`: Lightning with its CLI, and scikit-learn, whose handwritten digits most of them train on. The
ones for Accelerate and transformers need `pip install '.[all]'`, and `peft_lora` `peft` beside that. Nothing is downloaded, and
two CPU cores are enough. `training` has what `digits` and `chargpt` share.
"""
