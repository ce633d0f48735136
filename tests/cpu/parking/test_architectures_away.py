"""`transformers` architectures with everything away that may go: bit-identical, and as large as predicted."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks.models.zoo import ZOO
from lightning_memopt.plan import simulate
from tests.cpu.lib.stepped import Stepped, held, same

NAMES = {
    "bert": "an encoder",
    "deberta": "gathered relative positions",
    "fnet": "Fourier transforms, complex views",
    "t5": "encoder and decoder, one bias for all layers",
    "llama": "rotary embeddings, grouped heads",
    "mixtral": "experts chosen by a router, with jitter",
    "mamba2": "a chunked scan",
    "convnext": "stochastic depth, layer scale",
    "whisper": "convolutions and cross attention",
}


def of(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, batch = ZOO[name].build()

    def loss() -> Tensor:
        np.random.seed(7)
        random.seed(7)
        return ZOO[name].loss(model(**copy.deepcopy(batch)))

    return model, loss


@pytest.mark.parametrize("name", [name for name in NAMES if name in ZOO])
def test_bits_and_bytes_with_everything_away(name: str) -> None:
    model, loss = of(name)
    one = Stepped(model, loss, room=1 << 28)
    expected = one.step()
    for program in (one.away(), one.away(held(one.graph, 4))):
        for _ in range(2):
            assert same(expected, one.step(program))
        assert one.used_nbytes() == 0
        predicted = simulate(one.graph, program.lives).predicted.peak_nbytes
        measured = one.peak_nbytes(program)
        print(name, len(program.parked), len(program.schedule.rebuilt), measured / predicted)
        assert measured <= 1.01 * predicted
    one.depot.close()
