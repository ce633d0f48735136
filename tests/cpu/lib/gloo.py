"""A group of ranks with gloo between them, in which a rank that is silent is soon given up."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import distributed

from lightning_memopt.ranks import board, ranks
from lightning_memopt.trace import count_all


def join(store: Path, rank: int, world: int, patient_seconds: float) -> None:
    """Join the group as this rank.

    store: the file by which the ranks find each other.
    patient_seconds: the time after which a silent rank is given up.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    board.BEAT_SECONDS = 0.2
    ranks.SILENT_SECONDS = patient_seconds
    ranks.LAST_WORDS_SECONDS = patient_seconds
    file = distributed.FileStore(str(store), world)
    distributed.init_process_group("gloo", store=file, rank=rank, world_size=world)
    count_all(lambda _: None)
