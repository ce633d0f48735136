"""A peer: torch's `activation_memory_budget`, under AOTAutograd with the min-cut partitioner and no kernels fused."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lib.bench import Bench, Forward


def compiled(bench: Bench, budget: float) -> tuple[Forward, dict[str, int]]:
    """A compiled forward; its FLOPs, those of its backward included, are added to "total" while "counting" is not 0."""
    import torch._functorch.config as config
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    flops = {"total": 0, "counting": 0}

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def counted(*args: Any) -> Any:
            if not flops["counting"]:
                return gm.forward(*args)
            with FlopCounterMode(display=False) as counter:
                out = gm.forward(*args)
            flops["total"] += counter.get_total_flops()
            return out

        return make_boxed_func(counted)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    model = torch.compile(bench.model, backend=backend)

    def forward() -> torch.Tensor:
        with config.patch(activation_memory_budget=budget):
            loss: torch.Tensor = model(**bench.batch).loss
            return loss

    return forward, flops
