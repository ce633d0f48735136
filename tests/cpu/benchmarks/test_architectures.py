"""`transformers` architectures of different structure in half of their activations; `python -m benchmarks architectures`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from benchmarks.robustness import loops_count
from benchmarks.robustness.architectures import TIMEOUT
from benchmarks.robustness.worker import Row, ask

pytestmark = [pytest.mark.long, pytest.mark.skipif(loops_count.built() is None, reason="needs a compiler")]

PLANNED = {
    "fnet": "Fourier transforms, complex views",
    "ctrl": "attention masks made anew every step",
    "flaubert_layerdrop": "layers that are left out at random",
    "wav2vec2_spec_augment": "masks drawn by numpy, convolutions, CTC",
    "whisper": "a batch that is masked in place",
    "mixtral": "experts chosen by a router, with jitter",
    "mamba2": "a chunked scan",
    "recurrent_gemma": "a scan whose result is written step by step, over and over in one memory",
    "convnext": "stochastic depth, layer scale",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    ask("benchmarks.robustness.architectures", [*PLANNED, "reformer"], 1, found.__setitem__, TIMEOUT)
    return found


@pytest.mark.parametrize("name", PLANNED)
def test_half_of_the_activations(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    assert row["status"] == "planned", (row["status"], row.get("different"), row.get("note"))
    assert row["finite"] and row["replayed"] > 0
    assert row["measured"] <= row["budget"] < row["unmodified"]
    assert row["observed"] <= 1.0 and row["observed_freely"] <= 1.1


def test_what_cannot_be_planned_is_refused_by_name(rows: dict[str, Row]) -> None:
    """Reformer's layers are reversible: its own backward makes activations again, and little is saved to be dropped."""
    row = rows["reformer"]
    assert row["status"] == "refused" and row["note"].startswith("InfeasibleError")
