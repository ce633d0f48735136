"""`transformers` architectures of different structure in half of their activations; `python -m benchmarks architectures`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from benchmarks.robustness.architectures import examine

pytestmark = pytest.mark.long

PLANNED = {
    "fnet": "Fourier transforms, complex views",
    "ctrl": "attention masks made anew every step",
    "flaubert_layerdrop": "layers that are left out at random",
    "wav2vec2_spec_augment": "masks drawn by numpy, convolutions, CTC",
    "whisper": "a batch that is masked in place",
    "mixtral": "experts chosen by a router, with jitter",
    "mamba2": "a chunked scan",
    "convnext": "stochastic depth, layer scale",
}


@pytest.mark.parametrize("name", PLANNED)
def test_half_of_the_activations(name: str) -> None:
    row = examine(name, planned=2)
    assert row["status"] == "planned", (row["status"], row.get("different"), row.get("note"))
    assert row["finite"] and row["replayed"] > 0
    assert row["measured"] <= row["budget"] < row["unmodified"]


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    """Reformer's layers are reversible: its own backward makes activations again, and little is saved to be dropped."""
    row = examine("reformer", planned=1)
    assert row["status"] == "refused" and row["note"].startswith("InfeasibleError")
