"""Ranks with gloo between them that update parameters in backward:
`python -m tests.cpu.lib.early_ranks FOLDER WORLD [CASE ...]`.

Rank r writes what each case came to into FOLDER/r.json. Imports are made once: the ranks are forked, before anything has run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptDDPStrategy, MemOptModelParallelStrategy, optimize
from lightning_memopt.session import times
from lightning_memopt.trace import count_all
from tests.cpu.lib import fits, sharded
from tests.cpu.lib.early import counted
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.loops import batches
from tests.cpu.lib.process import digest
from tests.cpu.lib.said import listening
from tests.cpu.lib.sharded import peak
from tests.cpu.lib.times import OfMachine
from tests.cpu.lib.two_ranks import raised

STEPS = 10


class Net(nn.Module):
    """Layers in several buckets, one of them in another memory format. `skips`: the forward leaves out a layer."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.head = nn.Linear(64, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x).mean(1).flatten(1)
        for i, layer in enumerate(self.layers):
            if not (self.skips and i == 2):
                h = h + nn.functional.gelu(nn.functional.dropout(layer(h), 0.1))
        return self.head(h)  # type: ignore[no-any-return]


def train(
    mode: str | None,
    steps: range = range(STEPS),
    parts: int = 1,
    skips: Callable[[int], bool] = lambda step: False,
    clips: bool = False,
    states: Any = None,
    prepare: Callable[[DistributedDataParallel], Any] = lambda wrapped: None,
    options: dict[str, Any] | None = None,
    **ddp: Any,
) -> dict[str, Any]:
    """A loop over a wrapped model, plainly where `mode` is None, and what it ends with. `states`: those of a checkpoint."""
    net, rank = Net(), distributed.get_rank()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.03, **ddp)
    prepare(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    torch.manual_seed(5 + rank)
    if states is not None:
        wrapped.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        torch.set_rng_state(states[2])
    losses, peaks = [], [0]
    with contextlib.ExitStack() as stack:
        updates = counted(stack.enter_context(pytest.MonkeyPatch.context()))
        said = stack.enter_context(listening())
        run = None
        if mode is not None:
            memopt: Any = dict(budget="min", profile_steps=1, solver_seconds=0.3) | (options or {})
            run = stack.enter_context(optimize(wrapped, optimizer, optimizer_in_backward=mode, **memopt))
        for i in steps:
            net.skips = skips(i)
            with peak() as peaks:
                for part in range(parts):
                    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1000 * i + 10 * part + rank))
                    last = part + 1 == parts
                    with contextlib.nullcontext() if last else wrapped.no_sync():
                        loss = wrapped(x).square().mean()
                        with run.last_backward() if run is not None and last else contextlib.nullcontext():
                            loss.backward()
                    losses.append(loss.item())
                if clips:
                    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                del loss
        status = None if run is None else run.status()
    wrapped(x).square().mean().backward()  # after the run, the hook that stays does what the wrapper did
    optimizer.step()
    optimizer.zero_grad()
    plan = None if status is None else status.plan
    return {
        "state": digest(wrapped.state_dict(), optimizer.state_dict(), losses, torch.get_rng_state()),
        "weights": repr([p.double().sum().item() for p in net.parameters()]),
        "states": (copy.deepcopy(wrapped.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()),
        "updates": len(updates),
        "left": sum(p.grad is not None or bool(p._post_accumulate_grad_hooks) for p in net.parameters()),
        "said": said.getvalue(),
        "peak": peaks[0] if peaks else None,
        "predicted": None if plan is None else plan.predicted.needed_nbytes,
        "measured": None if status is None else status.measured_peak_nbytes,
    }


def pair(mode: str = "always", **loop: Any) -> dict[str, Any]:
    """The plain loop, and the same one with updates in backward."""
    found = {}
    for how, end in (("plain", None), ("early", mode)):
        found[how] = train(end, **loop)
        del found[how]["states"]
    return found


def resumed() -> dict[str, Any]:
    """A checkpoint of a run, early or plain, from which a run goes on, plain or early."""
    found: dict[str, Any] = {}
    first, second = range(8), range(8, 16)
    for one, other in ((None, None), (None, "always"), ("always", None)):
        states = train(one, first)["states"]
        found[f"{one} {other}"] = train(other, second, states=states)["weights"]
    return found


def one_rank(*modes: str) -> dict[str, Any]:
    """Each rank has a mode of its own."""
    return pair(modes[distributed.get_rank()], steps=range(6))


def refused() -> dict[str, Any]:
    few = range(4)

    def hooked(wrapped: DistributedDataParallel) -> None:
        wrapped.register_comm_hook(None, allreduce_hook)

    return {
        "hook": raised(lambda: train("always", few, prepare=hooked)),
        "auto, hook": pair("auto", steps=few, prepare=hooked),
        "clips": raised(lambda: train("always", few, clips=True)),
        "auto, views": pair("auto", steps=few, gradient_as_bucket_view=True),
        "within": raised(lambda: within(few)),
    }


def within(steps: range) -> None:
    """The model that is in the wrapper is given, before the wrapper is known."""
    net = Net()
    DistributedDataParallel(net)
    with optimize(net, torch.optim.SGD(net.parameters(), 0.1), budget="min", optimizer_in_backward="always", verbose=False):
        pass


def joined() -> list[Any]:
    """A run inside of `Join`, and `Join` inside of a run: what a plain loop, "auto" and "always" end with."""

    def loop(mode: str | None, outermost: bool) -> str:
        net, number = Net(), distributed.get_rank()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.03)
        optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
        torch.manual_seed(5 + number)
        with contextlib.ExitStack() as stack:
            if outermost:
                stack.enter_context(Join([wrapped]))
            run: Any = None
            if mode is not None:
                memopt: Any = dict(budget="min", profile_steps=1, solver_seconds=0.3, verbose=False)
                run = stack.enter_context(optimize(wrapped, optimizer, optimizer_in_backward=mode, **memopt))
            if not outermost:
                stack.enter_context(Join([wrapped]))
            for i in range(4 + 2 * number):
                x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(100 * i + number))
                loss = wrapped(x).square().mean()
                with contextlib.nullcontext() if run is None else run.last_backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return digest(wrapped.state_dict(), optimizer.state_dict(), torch.get_rng_state())

    return [
        [loop(None, outermost), loop("auto", outermost), raised(lambda o=outermost: loop("always", o))]  # type: ignore[misc]
        for outermost in (True, False)
    ]


def clips_on_one() -> list[str]:
    """One rank reads gradients, so no rank updates early: all raise before anything is updated."""
    return raised(lambda: train("always", range(4), clips=distributed.get_rank() == 1))


def of_sharded(name: str, **options: Any) -> dict[str, Any]:
    case = (sharded.CASES | sharded.FOUR)[name]
    found = {}
    for mode in (None, "always"):
        memopt = {} if mode is None else {"optimizer_in_backward": mode} | options
        with pytest.MonkeyPatch.context() as patch:
            updates = counted(patch)
            end = sharded.without_states(
                sharded.train(case, mode is not None, steps=range(STEPS if name == "blocks" else 8), **memopt)
            )
        found["early" if mode else "plain"] = end | {"updates": len(updates)}
    return found


def sharded_budget() -> dict[str, Any]:
    """A budget in bytes, between the smallest plan and the unmodified step."""
    smallest = sharded.train(sharded.CASES["blocks"], True, steps=range(5), optimizer_in_backward="always")
    budget = (smallest["needs"] + smallest["unmodified"]) // 2
    return of_sharded("blocks", budget=budget) | {"budget": budget}


def in_lightning(
    plain: Callable[..., Any], ours: Callable[..., Any], task: Callable[[], Any], *data: torch.Tensor
) -> dict[str, Any]:
    """A fit with Lightning's strategy, and one with ours that updates early."""
    memopt: Any = dict(budget="min", profile_steps=1, solver_seconds=0.3, optimizer_in_backward="always", verbose=False)
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": str(distributed.get_rank())}
    ends = {}
    for how, strategy in (("plain", plain()), ("early", ours(**memopt))):
        torch.manual_seed(0)
        model = task()
        torch.manual_seed(5)
        trainer = fits.trainer_of(strategy, devices=2, max_epochs=-1, max_steps=6)
        with pytest.MonkeyPatch.context() as patch:
            updates = counted(patch)
            trainer.fit(model, DataLoader(TensorDataset(*data), 16))
        ends[how] = {"state": sharded.bits_of(model, trainer.optimizers[0], []), "updates": len(updates)}
    status = trainer.strategy.status()
    ends["early"] |= {"predicted": status.plan.predicted.needed_nbytes, "measured": status.measured_peak_nbytes}
    return ends


def in_ddp() -> dict[str, Any]:
    gloo: Any = {"process_group_backend": "gloo"}
    data = batches(1, 192)[0]
    return in_lightning(partial(DDPStrategy, **gloo), partial(MemOptDDPStrategy, **gloo), fits.Task, *data)


def in_model_parallel() -> dict[str, Any]:
    sizes: Any = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    words = torch.randint(0, sharded.WORDS, (192, sharded.LENGTH), generator=torch.Generator().manual_seed(1))
    plain, ours = partial(ModelParallelStrategy, **sizes), partial(MemOptModelParallelStrategy, **sizes)
    return in_lightning(plain, ours, sharded.Task, words)


CASES: dict[str, Callable[[], Any]] = {
    "default": pair,
    "views": lambda: pair(steps=range(8), gradient_as_bucket_view=True),
    "static": lambda: pair(steps=range(9), static_graph=True),
    "unused": lambda: pair(
        steps=range(9), find_unused_parameters=True, skips=lambda i: distributed.get_rank() == 1 and i % 3 == 2
    ),
    "accumulates": lambda: pair(steps=range(8), parts=3),
    "resumed": resumed,
    "auto and never": lambda: one_rank("auto", "never"),
    "refused": refused,
    "clips on one": clips_on_one,
    "joined": joined,
    "lightning, DDP": in_ddp,
    "lightning, FSDP2": in_model_parallel,
    "sharded": lambda: of_sharded("blocks"),
    "nested": lambda: of_sharded("nested"),
    "keeps weights": lambda: of_sharded("keeps weights"),
    "root reshards": lambda: of_sharded("root reshards"),
    "bf16": lambda: of_sharded("bf16"),
    "offloaded": lambda: of_sharded("offloaded"),
    "holds sync": lambda: of_sharded("holds sync"),
    "sharded clips": lambda: raised(lambda: of_sharded("accumulates")),
    "sharded budget": sharded_budget,
}


def rank(number: int, world: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=world)
    count_all(print)
    times.current = OfMachine()  # the same plans in every run
    results = {}
    for name in names:
        results[name] = CASES[name]()
        distributed.barrier()  # nobody is left waiting in a collective of the case before
    (folder / f"{number}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    size = int(sys.argv[2])
    arguments = [(number, size, Path(sys.argv[1]), sys.argv[3:] or list(CASES)) for number in range(size)]
    sys.exit(failed(forked(rank, arguments, seconds=400)))
