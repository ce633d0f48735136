"""Memory that tiles read is freed by the loop before they have read it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.cpu.lib.engines import needs_tiles
from tests.cpu.tiles.language_model import LanguageModel, batches, compare


def freed(model: Any, optimizer: Any, log: Any, run: Any) -> None:
    """The head is frozen, so backward does not need what it reads. From the seventh step on, the loop frees that."""
    model.head.weight.requires_grad_(False)
    for step, (ids, labels) in enumerate(batches(9)):
        hidden = model.hidden(ids)
        loss = F.cross_entropy(model(ids)[0].flatten(0, 1) if step < 3 else model.head(hidden).flatten(0, 1), labels.flatten())
        if step > 6:
            hidden.untyped_storage().resize_(0)
        loss.backward()
        log.note(loss)
        optimizer.step()
        optimizer.zero_grad()


@needs_tiles
def test_logits_are_made_whole_before_memory_that_they_are_made_of_is_freed() -> None:
    torch.manual_seed(1)
    ran = compare(freed, LanguageModel())
    assert ran.tiled
