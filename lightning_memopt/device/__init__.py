"""What differs between devices. No other package compares the types of devices, or names `torch.cuda` or `torch.accelerator`.

- `kinds`: what a plan has to know of a type of device, without torch.
- `backends`: what can be asked of a device (`backend`): memory, statistics, streams, events, page-locked memory. There are
  `cpu`, `cuda` (ROCm too, which torch calls by the same name) and `accelerator` for all others.
- `places`: where tensors are, and which device is the current one of a thread.
- `determinism`: which ops do not give the same bits twice on a type of device.

Nothing is imported here: plans read `kinds` where torch is not installed.
"""
