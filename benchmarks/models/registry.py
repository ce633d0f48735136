"""The models of the benchmarks: name -> builder of (model, batch, blocks). To add some, add their dict to `MODELS`.

Those of `transformers` are in the package, for `memopt bench`; here are those that it has beside them, and shorter batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models import convolutional, recurrent
from lightning_memopt.bench import zoo
from lightning_memopt.bench.zoo import Built

MODELS: dict[str, Callable[..., Built]] = {**zoo.MODELS, **convolutional.MODELS, **recurrent.MODELS}
WORDS: dict[str, dict[str, int]] = {  # texts that are longer otherwise
    "gpt2": {"length": 64},
    "llama": {"length": 64},
    "t5": {"source": 64, "target": 64},
    "bert": {"length": 64},
    "mixtral": {"length": 64},
}


def built(name: str, batch: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, and a batch of that many samples, of at most 64 words each."""
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name](batch=batch, **WORDS.get(name, {}))
    return model, inputs
