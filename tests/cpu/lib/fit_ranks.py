"""Two ranks with gloo between them, whose steps are computed: `python -m tests.cpu.lib.fit_ranks FOLDER`. Rank r writes the
graphs of its steps into FOLDER/r.json. The same steps are recorded in tests/cpu/fitting/test_sharding.py.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional

from benchmarks.lib.graphs import computed
from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.sharding import shard
from lightning_memopt.graph import graph_to_json
from lightning_memopt.trace import count_all
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.sharded import BATCH, LENGTH, WORDS, Language
from tests.cpu.lib.trainings import training_of

WORLD = 2


class Odd(nn.Module):
    """Sizes that no number of ranks divides, so shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 27), nn.Linear(27, 5)
        self.layers = nn.ModuleList(nn.Linear(27, 27) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def language() -> Training:
    """A small GPT with dropout and a tied head."""
    torch.manual_seed(0)
    model = Language(3)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(0, WORDS, (BATCH, LENGTH))
    return training_of(model, optimizer, lambda: functional.cross_entropy(model(words).flatten(0, 1), words.flatten()))


def odd() -> Training:
    torch.manual_seed(0)
    model = Odd().to(torch.bfloat16)
    shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    return training_of(model, optimizer, lambda: model(x).square().mean())


CASES: dict[str, Callable[[], Training]] = {"language": language, "odd": odd}


def rank(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(folder / "store"), WORLD), rank=number, world_size=WORLD
    )
    count_all(print)
    graphs = {}
    for name, build in CASES.items():
        graphs[name] = graph_to_json(computed(build))
        gc.collect()  # sharded modules are in cycles
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps(graphs))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(failed(forked(rank, [(number, Path(sys.argv[1])) for number in range(WORLD)])))
