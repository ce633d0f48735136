"""Peak bytes of a rank under FSDP2 and FLOPs that run again: without a plan, with each unit checkpointed, with plans.

    python -m benchmarks fsdp2                          # two and four ranks; writes results/fsdp2.json, a case at a time
    python -m benchmarks fsdp2 --ranks 2 --models gpt2  # one case; the others stay as they are recorded
    python -m benchmarks fsdp2 --table                  # what is recorded, as Markdown
    python -m benchmarks fsdp2 --runs 10 --ranks 2      # ten runs of a small GPT-2: peaks beside their predictions

Every block is a unit (`fully_shard`), and the model. Ranks are processes with gloo between them; each has a batch of its own.
`checkpointed` is torch's checkpoint (non-reentrant) around the forward of every block. `within` is a plan of fewest FLOPs whose
budget is the checkpointed peak; `min` is the smallest plan. Peaks are those of the last of five steps, by the allocator's
counter, less what the process held before; hashes are of this rank's parameters, optimizer state, losses and generator.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.digests import hashed
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS
from lightning_memopt import optimize
from lightning_memopt.native import counter

FILE = RESULTS / "fsdp2.json"
STEPS, PROFILED = 5, 2
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 4, "batch": 4, "length": 128},
    "t5": {"batch": 4, "source": 64, "target": 48},
    "vit": {"batch": 6},
}
SMALL = {"layers": 2, "batch": 2, "length": 32}
"""Sizes of the GPT-2 of `--runs`."""
KINDS = ("plain", "checkpointed", "within", "min")


def built(name: str, checkpointed: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The sharded model, the same on all ranks, and a batch of this rank."""
    torch.manual_seed(0)
    model, _, blocks = MODELS[name](**SIZES[name])
    torch.manual_seed(100 + distributed.get_rank())
    batch = MODELS[name](**SIZES[name])[1]
    for block in blocks(model):
        if checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block)
    fully_shard(model)
    return model, batch


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> str:
    states = [t for p in model.parameters() for t in (p, *optimizer.state.get(p, {}).values())]
    return hashed([torch.tensor(losses, dtype=torch.float64), *states, torch.get_rng_state()])


def trained(name: str, kind: str, budget: int | str, held: int) -> dict[str, Any]:
    """Five steps of one kind, and what they came to."""
    model, batch = built(name, kind == "checkpointed")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(5 + distributed.get_rank())
    counts = counter()
    assert counts is not None, "the native counter is needed"
    losses, found = [], dict[str, Any]()
    options: dict[str, Any] = {"budget": budget, "objective": "flops", "profile_steps": PROFILED, "verbose": False}
    planned = kind in ("within", "min")
    with optimize(model, optimizer, **options) if planned else contextlib.nullcontext() as run:
        for i in range(STEPS):
            flops = FlopCounterMode(display=False) if not planned and i == 1 else contextlib.nullcontext()
            window = counts.window()
            assert window is not None
            with flops:
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            found["peak_nbytes"] = window.peak_nbytes - held
            found.setdefault("peaks", []).append(found["peak_nbytes"])
            window.close()
            if isinstance(flops, FlopCounterMode):
                found["flops"] = flops.get_total_flops()
        if run is not None and run.plan is not None:
            predicted = run.plan.predicted
            found |= {
                "predicted_nbytes": predicted.peak_nbytes - held,
                "extra_flops": predicted.extra_flops,
                "rebuilt_ops": predicted.rebuilt_ops,
            }
    return found | {"hash": digest(model, optimizer, losses)}


def joins(number: int, world: int, folder: Path) -> None:
    """This process becomes a rank."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=world)


def repeated(number: int, world: int, runs: int, folder: Path) -> None:
    """The smallest plan, `runs` times: by how many bytes the peak of each planned step is above its prediction."""
    joins(number, world, folder)
    SIZES["gpt2"] = SMALL
    above = []
    for _ in range(runs):
        gc.collect()
        result = trained("gpt2", "min", "min", held_nbytes())
        above += [peak - result["predicted_nbytes"] for peak in result["peaks"][PROFILED:]]
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps({"above": above, "predicted_nbytes": result["predicted_nbytes"]}))
    distributed.destroy_process_group()


def rank(number: int, world: int, name: str, folder: Path) -> None:
    joins(number, world, folder)
    row: dict[str, Any] = {}
    for kind in KINDS:
        gc.collect()
        held = held_nbytes()
        row[kind] = trained(name, kind, held + row["checkpointed"]["peak_nbytes"] if kind == "within" else "min", held)
        del row[kind]["peaks"]
        distributed.barrier()
    row["checkpointed"]["extra_flops"] = row["checkpointed"]["flops"] - row["plain"]["flops"]
    (folder / f"{number}.json").write_text(json.dumps(row))
    distributed.destroy_process_group()


def measured(world: int, what: str | int, of_rank: Callable[..., None] = rank) -> list[dict[str, Any]]:
    """What each rank wrote. `what`: the name of a model, or how many runs."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=of_rank, args=(i, world, what, Path(folder))) for i in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank failed")
        return [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(world)]


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """A row for each model and number of ranks; of the ranks, the largest."""
    lines = [
        "| model, ranks | unmodified | checkpointed | plan within that peak | smallest plan | exact | predicted within |",
        "|---|---|---|---|---|---|---|",
    ]
    for world, of_models in results.items():
        for name, rows in of_models.items():

            def cell(kind: str, rows: list[dict[str, Any]] = rows) -> str:
                peak = max(row[kind]["peak_nbytes"] for row in rows) / 2**20
                again = max(row[kind].get("extra_flops", 0) for row in rows) / rows[0]["plain"]["flops"]
                return f"{peak:.2f} MiB" + (f", +{100 * again:.1f} % FLOPs" if kind != "plain" else "")

            exact = all(row[kind]["hash"] == row["plain"]["hash"] for row in rows for kind in KINDS[2:])
            off = max(
                abs(row[kind]["peak_nbytes"] - row[kind]["predicted_nbytes"]) / row[kind]["peak_nbytes"]
                for row in rows
                for kind in KINDS[2:]
            )
            cells = " | ".join(map(cell, KINDS))
            lines.append(f"| {name}, {world} | {cells} | {'yes' if exact else 'NO'} | {100 * off:.2f} % |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", help="default: 2 and 4")
    parser.add_argument("--models", nargs="*", help=f"default: {', '.join(SIZES)}")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    parser.add_argument("--runs", type=int, help="repeat only this many runs; print how far peaks are from predictions")
    args = parser.parse_args()
    if args.runs:
        for world in args.ranks or (2, 4):
            rows = measured(world, args.runs, repeated)
            above, steps = [n for row in rows for n in row["above"]], len(rows[0]["above"])
            predicted = rows[0]["predicted_nbytes"]
            print(f"{world} ranks, {args.runs} runs, {steps} planned steps each: predicted {predicted} bytes, measured")
            print(f"{min(above):+d} to {max(above):+d} bytes ({100 * max(map(abs, above)) / predicted:.3f} %)", flush=True)
        return 0
    if args.table:
        print(table(json.loads(FILE.read_text())))
        return 0
    for world in args.ranks or (2, 4):
        for name in args.models or SIZES:
            rows = measured(world, name)
            print(table({str(world): {name: rows}}), flush=True)
            results = json.loads(FILE.read_text()) if FILE.exists() else {}
            results.setdefault(str(world), {})[name] = rows
            FILE.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
