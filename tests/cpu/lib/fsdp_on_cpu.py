"""Run a script in which Accelerate shards on the CPU, with gloo, as on GPUs: `python -m tests.cpu.lib.fsdp_on_cpu SCRIPT ...`.

Accelerate reads its FSDP options on the CPU, too, and then trains with DDP all the same.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState


def shard_on_cpu() -> None:
    """From now on, an Accelerator on the CPU shards where it was told to."""
    plain = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            # every later `AcceleratorState()` copies what is in the other one
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


if __name__ == "__main__":
    shard_on_cpu()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
