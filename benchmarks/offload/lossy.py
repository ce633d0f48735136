"""Training with every eligible map really encoded: does it end where the exact run ends?

    python -m benchmarks lossy [--seeds 3] [--epochs 8] [--steps 200] [--batch-size 16] [--models digits,chargpt] [-o FILE]

The two demo trainings, each seed with the same weights, batches and dropout masks: exactly, and under plans that encode all
that `compress=` may touch with errors, in every step and whatever a budget would choose. 5x: 6 bits a value (32 / 6 = 5.3), 8x:
4 bits. `int4`, the group quantiser, is there to compare with: 5 bits with its scales (6.4x); it has no form for results of
ReLU, so that on the ResNet there is next to nothing for it. Learning rates fall to 0 along a cosine: the last step does not
decide.

What went through the codecs is counted where they are called. Runs that FILE has already are not run again.
The bar (FreeLunch, IV-D): accuracy within 0.5 points of the exact run's, held-out loss within 1 %, means over seeds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.lib.paths import RESULTS
from examples import chargpt, digits
from lightning_memopt import optimize
from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import Graph, fingerprint
from lightning_memopt.plan import Life, Plan, simulate, write_plan
from lightning_memopt.runtime import parked
from lightning_memopt.runtime.codecs import Codec, codec
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.solvers.offload.trips import TripPlanner, send_away
from lightning_memopt.solvers.rollout import keep_all

CPU = torch.device("cpu")
MODELS: dict[str, Any] = {"digits": digits, "chargpt": chargpt}
TITLES = {"digits": "digits ResNet", "chargpt": "character GPT"}
FORMS = {"digits": ("exact", "block6", "block4"), "chargpt": ("exact", "block6", "block4", "int4")}
BAR = {"digits": 0.5, "chargpt": 1.0}
"""Points of accuracy; percent of the loss."""


class Instant:
    """A link that takes no time: what can be away is away for as long as it can be."""

    def out_seconds(self, tier: str, nbytes: int) -> float:
        return 0.0

    in_seconds = encode_seconds = decode_seconds = out_seconds


@dataclass
class Row:
    """One training. `maps` of `map_nbytes` are eligible, of `saved_nbytes` that autograd saves; `encoded_nbytes` of them in
    `encoded` a step, into `written_nbytes`: counted, means over all steps. `loss`, `accuracy` (percent): held-out.
    """

    model: str
    form: str
    seed: int
    steps: int
    batch_size: int
    maps: int
    map_nbytes: int
    saved_nbytes: int
    encoded: float
    encoded_nbytes: float
    written_nbytes: float
    last_losses: float
    loss: float
    accuracy: float


def observed(task: Any, settings: Any, seed: int = 0) -> Graph:
    """The graph of one step of a model like that which is trained."""
    workload = task.build(seed, settings)
    model, batch = workload.model, next(iter(workload.train_loader))
    observation = Observation(model, [], CPU, None, verify=False, meter=True)
    with observation.begin_round((batch[0],)):
        output = model(batch[0])
    observation.forward_ended()
    nn.functional.cross_entropy(output.flatten(0, -2), batch[1].flatten()).backward()
    del output
    graph = observation.finish()
    assert graph is not None
    return graph


def eligible(graph: Graph, compress: str, lossy: bool = True) -> dict[int, tuple[str, int]]:
    """What this value of `compress` may encode: form and bytes, by tensor. `lossy`: only in forms with errors."""
    forms = Offloading(CPU, MemOptConfig(budget="min", compress=compress)).forms(graph)
    return {t: of[0] for t, of in forms.items() if of and (not lossy or not codec(of[0][0]).exact)}


def everything_away(graph: Graph, forms: dict[int, tuple[str, int]]) -> tuple[Life, ...]:
    """The lives of the unmodified step, but that all of these tensors are away from their last reader to their first."""
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, Instant())
    assert forms.keys() <= planner.gaps.keys(), "an eligible map has no gap: it would stay as it is"
    return send_away(lives, planner.plan(forms))


def plan_of(graph: Graph, lives: tuple[Life, ...]) -> Plan:
    predicted = simulate(graph, lives).predicted
    return Plan(
        fingerprint=fingerprint(graph),
        lives=lives,
        solver="every eligible map",
        budget_nbytes=predicted.peak_nbytes,
        predicted=predicted,
        unmodified_peak_nbytes=simulate(graph, keep_all(graph)).predicted.peak_nbytes,
    )


class Counted:
    """A codec that counts what it encodes."""

    def __init__(self, inner: Codec, counts: list[int]) -> None:
        self._inner, self._counts = inner, counts

    def encode(self, t: Tensor, out: Tensor) -> None:
        self._inner.encode(t, out)
        for i, n in enumerate((1, t.nbytes, out.nbytes)):
            self._counts[i] += n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Tensors, their bytes and encoded bytes, of all that the engine encodes in this block."""
    counts = [0, 0, 0]
    with mock.patch.object(parked, "codec", lambda name: Counted(codec(name), counts)):
        yield counts


def held_out(task: Any, workload: Any) -> tuple[float, float]:
    """Loss and accuracy in percent."""
    workload.model.eval()
    loss = right = count = 0.0
    with torch.no_grad():
        for x, y in workload.held_out_loader:
            logits = workload.model(x).flatten(0, -2)
            loss += float(nn.functional.cross_entropy(logits, y.flatten(), reduction="sum"))
            right += int((logits.argmax(-1) == y.flatten()).sum())
            count += y.numel()
    return loss / count, 100 * right / count


def trained(name: str, form: str, seed: int, steps: int, settings: Any) -> Row:
    """One training of several steps, each under the plan of `form`."""
    task = MODELS[name]
    graph = observed(task, settings)
    forms = {} if form == "exact" else eligible(graph, form)
    sizes = {t: graph.tensors[t].nbytes for t in {save.tensor for save in graph.saves}}
    workload = task.build(seed, settings)
    model, optimizer = workload.model, workload.make_optimizer(workload.model)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, counting() as counts:
        path = Path(folder) / "plan.json"
        planned: Any = nullcontext()
        if forms:
            write_plan(path, plan_of(graph, everything_away(graph, forms)), graph)
            planned = optimize(model, optimizer, plan=path, budget="auto", compress=form, verbose=False, verify=False)
        torch.manual_seed(seed)
        with planned as run:
            while len(losses) < steps:
                for batch in workload.train_loader:
                    loss = task.loss_of(model, batch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    falling.step()
                    losses.append(loss.item())
                    if len(losses) == steps:
                        break
            if run is not None:
                status = run.status()
                assert status.phase == "planned" and not status.deviates, "a step left the plan: not all was encoded"
    loss, accuracy = held_out(task, workload)
    return Row(
        model=name,
        form=form,
        seed=seed,
        steps=steps,
        batch_size=settings.batch_size,
        maps=len(forms),
        map_nbytes=sum(sizes[t] for t in forms),
        saved_nbytes=sum(sizes.values()),
        encoded=counts[0] / steps,
        encoded_nbytes=counts[1] / steps,
        written_nbytes=counts[2] / steps,
        last_losses=statistics.fmean(losses[-10:]),
        loss=loss,
        accuracy=accuracy,
    )


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """Of every model and form: means over seeds, and how far from the exact runs of the same seeds."""
    found = []
    for model, form in dict.fromkeys((row.model, row.form) for row in rows):
        of = [row for row in rows if (row.model, row.form) == (model, form)]
        exact = {row.seed: row for row in rows if row.model == model and row.form == "exact"}
        pairs = [(row, exact[row.seed]) for row in of if row.seed in exact]
        if not pairs:
            continue
        points = [row.accuracy - e.accuracy for row, e in pairs]
        percent = [100 * (row.loss / e.loss - 1) for row, e in pairs]
        mean = statistics.fmean(points) if model == "digits" else -statistics.fmean(percent)
        found.append(
            {
                "model": model,
                "form": form,
                "seeds": len(pairs),
                "steps": of[0].steps,
                "batch_size": of[0].batch_size,
                "maps": of[0].maps,
                "share_of_saved": of[0].map_nbytes / of[0].saved_nbytes,
                "encoded_mib": statistics.fmean(row.encoded_nbytes for row in of) / 2**20,
                "ratio": sum(row.encoded_nbytes for row in of) / max(1, sum(row.written_nbytes for row in of)),
                "all_encoded": all((row.encoded, row.encoded_nbytes) == (row.maps, row.map_nbytes) for row in of),
                "accuracy": statistics.fmean(row.accuracy for row, _ in pairs),
                "points": points,
                "loss": statistics.fmean(row.loss for row, _ in pairs),
                "percent": percent,
                "kept": mean >= -BAR[model],
            }
        )
    return found


def table(short: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | at | maps, MiB a step | of what is saved | bytes | accuracy | points, by seed | loss | %, by seed | kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in short:
        exact = row["form"] == "exact"
        changed = ["" if exact else ", ".join(f"{v:+.2f}" for v in row[key]) for key in ("points", "percent")]
        lines.append(
            f"| {TITLES[row['model']]} | {row['form']} | "
            + ("| | | " if exact else f"{row['maps']}, {row['encoded_mib']:.2f} | {100 * row['share_of_saved']:.1f} % | ")
            + ("" if exact else f"/ {row['ratio']:.2f} | ")
            + f"{row['accuracy']:.2f} % | {changed[0]} | {row['loss']:.4f} | {changed[1]} | "
            + ("" if exact else "yes" if row["kept"] else "no")
            + " |"
        )
    return "\n".join(lines)


def write(path: Path, rows: list[Row], arguments: list[str]) -> None:
    """JSON, a row a line."""
    of = {"summary": summary(rows), "rows": [asdict(row) for row in rows]}
    parts = [f'"{key}": [\n' + ",\n".join("  " + json.dumps(v) for v in values) + "]" for key, values in of.items()]
    command = json.dumps(shlex.join(["python", "-m", "benchmarks", "lossy", *arguments]))
    path.write_text(f'{{"command": {command},\n' + ",\n".join(parts) + "}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8, help="of the digits, 11 steps each")
    parser.add_argument("--steps", type=int, default=200, help="of the character GPT")
    parser.add_argument("--batch-size", type=int, help="of the character GPT; the demo's, where left out")
    parser.add_argument("--models", default="digits,chargpt")
    parser.add_argument("--forms", default="", help="comma-separated; all, where left out")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "lossy.json")
    parser.add_argument("--markdown", action="store_true", help="only print the table of what FILE has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [Row(**row) for row in json.loads(options.out.read_text())["rows"]] if options.out.exists() else []
    done = {(row.model, row.form, row.seed, row.steps, row.batch_size) for row in rows}
    for name in () if options.markdown else options.models.split(","):
        settings = MODELS[name].FULL
        steps = 11 * options.epochs if name == "digits" else options.steps
        if name == "chargpt" and options.batch_size:
            settings = replace(settings, batch_size=options.batch_size)
        for seed in range(options.seeds):
            for form in options.forms.split(",") if options.forms else FORMS[name]:
                if (name, form, seed, steps, settings.batch_size) in done:
                    continue
                row = trained(name, form, seed, steps, settings)
                rows.append(row)
                print(f"{name} {form} seed {seed}: loss {row.loss:.4f}, {row.accuracy:.2f} %", file=sys.stderr, flush=True)
                write(options.out, rows, sys.argv[1:])
    print(table(summary(rows)))


if __name__ == "__main__":
    main()
