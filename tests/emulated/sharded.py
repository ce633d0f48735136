"""What `memopt fit --ranks` predicts of unmodified steps beside what torch's allocator gives out, on the emulated device.

Usage: python -m tests.emulated.sharded [MODEL ...]

One rank of several trains on an emulated card, with FSDP2's own code, streams and buffers. Its process group is torch's fake
one, whose collectives return at once: NCCL's buffers are missing on both sides. The rest is as in fitted.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers

from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting import recording
from lightning_memopt.fitting.sharding import one_rank_of, shard
from lightning_memopt.plan.allocator import Settings, reserved
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.plan.side_streams import with_pools
from lightning_memopt.solvers.rollout import keep_all
from tests.emulated.fitted import CARD_NBYTES, STEPS, leave_masks_out
from tests.emulated.llama import BLOCKS, configs, in_bfloat16
from tests.emulated.real_size import each_alone
from tests.emulated.reserved import MIB, WORKSPACE_NBYTES, steady

HEADER = (
    "| model | cards | allocated: predicted | measured | error | reserved: predicted | measured | error |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Case:
    """A model in bfloat16 over some ranks, each of which has one sample of some tokens."""

    build: Callable[[], Any]
    ranks: int
    length: int


def llama(**others: int) -> Any:
    return transformers.LlamaForCausalLM(configs.LlamaConfig(**BLOCKS | others))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(configs.MixtralConfig(vocab_size=32000, **BLOCKS))


_SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 32000}
CASES = {
    "a small llama": Case(partial(llama, **_SMALL), 4, 512),
    "llama-8b": Case(partial(llama, vocab_size=128256), 2, 4096),
    "llama-8b on 8": Case(partial(llama, vocab_size=128256), 8, 4096),
    "mixtral-8x7b": Case(mixtral, 8, 4096),
}


def training(case: Case, device: str) -> Training:
    """The training of one rank, in a process group. AdamW updates all weights together (`foreach`)."""
    with torch.device("meta"):
        model = in_bfloat16(case.build).train()
    shard(model, device=device)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    words = torch.zeros(1, case.length, dtype=torch.long, device=device)

    def step() -> None:
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def measure(name: str) -> None:
    """Print the row of one model."""
    leave_masks_out()
    case = CASES[name]
    with mock.patch.object(recording, "with_pools", lambda graph: graph):
        graph = recording.record(partial(training, case, "cpu"), cuda=True, ranks=case.ranks).graph
    predicted = at_peak(graph, keep_all(graph)).total + WORKSPACE_NBYTES
    graph = with_pools(graph)
    predicted_reserved = reserved(graph, keep_all(graph), Settings()).peak_nbytes + WORKSPACE_NBYTES
    torch.empty(1, device="cuda")
    with one_rank_of(case.ranks):
        measured = steady(training(case, "cuda").step, STEPS)
    cells = [name, f"{case.ranks}"]
    for ours, theirs in zip((predicted, predicted_reserved), reversed(measured), strict=True):
        cells += [f"{ours / MIB:.1f}", f"{theirs / MIB:.1f}", f"{100 * (ours / theirs - 1):+.3f} %"]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    what = "MiB; torch's own allocator on an emulated device, not on a GPU"
    each_alone(__doc__, __spec__.name, dict.fromkeys(CASES, CARD_NBYTES), measure, f"{what}\n{HEADER}")


if __name__ == "__main__":
    main()
