"""Two ranks with gloo between them that train a model which Accelerate shards by FSDP2: `python -m
tests.cpu.lib.accelerate_sharded FOLDER [CASE ...]`. Rank r writes what each case came to into FOLDER/r.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import distributed
from torch.nn import functional

from lightning_memopt.errors import MemOptError
from lightning_memopt.integrations import accelerate as front
from lightning_memopt.trace import count_all
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.fsdp_on_cpu import shard_on_cpu
from tests.cpu.lib.prepared import run_of
from tests.cpu.lib.said import listening
from tests.cpu.lib.sharded import Language, bits_of, data, peak

WORLD, STEPS = 2, 5


@dataclass(frozen=True)
class Case:
    """A loop.

    precision: `mixed_precision` of the Accelerator.
    accumulate: forwards and backwards before an update.
    clip: gradients are clipped by their norm.
    checkpoints: Accelerate checkpoints the activations of every block.
    saves: after two steps, the state goes through a file into new objects.
    """

    precision: str = "no"
    accumulate: int = 1
    clip: bool = False
    checkpoints: bool = False
    saves: bool = False


CASES = {
    "plain": Case(),
    "bf16": Case(precision="bf16", accumulate=2, clip=True),
    "checkpoints": Case(checkpoints=True),
    "saves": Case(saves=True),
}


def fresh(case: Case) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=case.checkpoints,
    )
    return Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulate
    )


def prepared(case: Case, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = fresh(case)
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options:
        model, optimizer = front.prepare(accelerator, model, optimizer, profile_steps=1, solver_seconds=0.3, **options)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(5 + distributed.get_rank())
    return accelerator, model, optimizer


def trained(case: Case, **options: Any) -> dict[str, Any]:
    accelerator, model, optimizer = prepared(case, **options)
    losses: list[float] = []
    for i in range(STEPS):
        if case.saves and i == 2:
            folder = [tempfile.mkdtemp() if accelerator.is_main_process else None]
            distributed.broadcast_object_list(folder)
            accelerator.save_state(folder[0])
            accelerator.free_memory()
            accelerator, model, optimizer = prepared(case, **options)
            accelerator.load_state(folder[0])
        with peak() as peaks:
            for part in range(case.accumulate):
                with accelerator.accumulate(model):
                    words = data(i, part)
                    loss = functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
                    accelerator.backward(loss)
                    if case.clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                    del loss
    found: dict[str, Any] = {"state": bits_of(model, optimizer.optimizer, losses), "peak": peaks[0] if peaks else None}
    if options:
        run = run_of(accelerator, model)
        status = None if run is None else run.status()
        if status is not None and status.plan is not None:
            found |= {
                "rebuilt": status.plan.predicted.rebuilt_ops,
                "predicted": status.predicted_peak_nbytes,
                "measured": status.measured_peak_nbytes,
                "needs": status.plan.budget_nbytes,
                "unmodified": status.plan.unmodified_peak_nbytes,
            }
    accelerator.free_memory()
    return found


def within_a_budget() -> dict[str, Any]:
    smallest = trained(Case(), budget="min")
    budget = (smallest["needs"] + smallest["unmodified"]) // 2
    return {"plain": trained(Case()), "planned": trained(Case(), budget=budget), "budget": budget}


def refused() -> dict[str, str]:
    """FSDP1, by its name, with nothing prepared."""
    accelerator = fresh(Case())
    accelerator.state.fsdp_plugin.fsdp_version = 1
    model = Language()
    try:
        front.prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1), budget="min")
    except MemOptError as error:
        return {"error": f"{type(error).__name__}: {error}", "models": str(len(accelerator._models))}
    return {"error": "", "models": ""}


def rank(number: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    store = distributed.FileStore(str(folder / "store"), WORLD)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    count_all(print)
    shard_on_cpu()
    found: dict[str, Any] = {}
    for name in cases or [*CASES, "budget", "refused"]:
        with listening() as said:
            if name in CASES:
                found[name] = {"plain": trained(CASES[name]), "planned": trained(CASES[name], budget="min")}
            else:
                found[name] = within_a_budget() if name == "budget" else refused()
        found[name]["said"] = said.taken()
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(failed(forked(rank, [(number, Path(sys.argv[1]), sys.argv[2:]) for number in range(WORLD)])))
