"""That a change of the code changes nothing: plans, peaks and bits of recorded cases, before and after.

    python -m benchmarks unchanged                 # compares with results/unchanged.json; exit code 1 where a row differs
    python -m benchmarks unchanged --record        # writes it
    python -m benchmarks unchanged --table         # what is recorded, as Markdown

Fifteen models at the smallest plan and within 0.4 of what a step has on top of what is resident; six with a disk and lossless
codecs, six with updates in backward, each at the smallest plan. Five steps each, on times of ops that are known beforehand
(tests/cpu/lib/times.py), so that plans are the same ones on every machine. A row has hashes of the plan's lives, of the losses,
and of all parameters at the end; and the peaks, predicted and measured, beside what the process held before.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.lib.bench import held_nbytes
from benchmarks.lib.digests import hashed
from benchmarks.lib.paths import RESULTS
from benchmarks.models.registry import MODELS, built
from lightning_memopt import optimize
from lightning_memopt.plan import Life
from lightning_memopt.session import times
from tests.cpu.lib.loops import budget_at
from tests.cpu.lib.times import Known

FILE = RESULTS / "unchanged.json"
BATCH, STEPS, SHARE = 4, 5, 0.4
AWAY: dict[str, Any] = {"offload": "disk", "compress": "lossless"}
EARLY: dict[str, Any] = {"optimizer_in_backward": "always"}
SIX = ("gpt2", "resnet50", "t5", "whisper", "unet", "nmt")


def cases() -> Iterable[tuple[str, str, dict[str, Any]]]:
    """(model, what of it, options); the share of what is on top needs the row of the smallest plan."""
    for name in MODELS:
        yield name, "smallest", {}
        yield name, "share", {}
        if name in SIX:
            yield name, "disk, lossless", AWAY
            yield name, "updates in backward", EARLY


def recorded_text(lives: Iterable[Life]) -> str:
    """A plan's lives in the words of the record, which is older than plan files of schema 4."""
    text = repr(tuple(lives))
    return text.replace("how='rebuild'", "how='replay'").replace("parked_nbytes=", "away_nbytes=")


def ran(name: str, above_nbytes: int | None, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The row, and what a budget needs for `SHARE` of what the unmodified step has on top of what is resident.

    `above_nbytes`: the budget, beside what the process holds; None for the smallest plan.
    """
    model, inputs = built(name, BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    gc.collect()
    held = held_nbytes()
    budget = "min" if above_nbytes is None else held + above_nbytes
    torch.manual_seed(1)
    losses = []
    with optimize(model, optimizer, budget=budget, profile_steps=2, tile="off", verbose=False, **options) as run:
        for _ in range(STEPS):
            loss = model(**inputs).loss
            with run.last_backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    status: Any = run.status()
    plan = status.plan
    row = {
        "plan": hashlib.sha256(recorded_text(plan.lives).encode()).hexdigest()[:16],
        "predicted_nbytes": plan.predicted_peak_nbytes - held,
        "measured_nbytes": status.measured_peak_nbytes - held,
        "replayed_ops": plan.predicted.rebuilt_ops,
        "losses": hashed(losses),
        "parameters": hashed(model.parameters()),
    }
    return row, budget_at(run, SHARE) - held


def rows() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = {}
    share = 0
    for name, what, options in cases():
        row, wanted = ran(name, share if what == "share" else None, options)
        share = wanted if what == "smallest" else share
        measured[f"{name}, {what}"] = row
        print(f"{name}, {what}: {json.dumps(row)}", flush=True)
    return measured


def table(recorded: dict[str, dict[str, Any]]) -> str:
    lines = ["| case | plan | predicted | measured | rebuilt ops | losses | parameters |", "|---|---|---|---|---|---|---|"]
    for case, row in recorded.items():
        plan, predicted, measured, ops, losses, parameters = row.values()
        lines.append(f"| {case} | {plan} | {predicted:,} | {measured:,} | {ops} | {losses} | {parameters} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    recorded = json.loads(FILE.read_text())["rows"] if FILE.exists() else {}
    if options.table:
        print(table(recorded))
        return 0
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    times.current = Known()
    now = rows()
    if options.record:
        FILE.write_text(json.dumps({"torch": torch.__version__, "rows": now}, indent=1) + "\n")
        return 0
    differs = [case for case in recorded.keys() | now.keys() if recorded.get(case) != now.get(case)]
    print(*(f"{case}: recorded {recorded.get(case)}, now {now.get(case)}" for case in sorted(differs)), sep="\n")
    print(f"{len(now) - len(differs)} of {len(now)} cases are as they were")
    return int(bool(differs))


if __name__ == "__main__":
    sys.exit(main())
