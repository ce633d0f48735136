"""Everything that differs between devices. No other package compares types of devices or uses `torch.cuda` or
`torch.accelerator`.

- `kinds`: what a plan has to know about a type of device, without torch.
- `backends`: access to a device (`backend`): memory, statistics, streams, events, page-locked memory. The backends are `cpu`,
  `cuda` (also for ROCm, which torch calls by the same name), and `accelerator` for all others.
- `places`: on which device tensors are, and which device is the current one of a thread.
- `determinism`: which ops do not give the same bits twice on a type of device.

This file imports nothing, because plans read `kinds` even where torch is not installed.
"""
