"""`memopt fit` with loss heads in tiles: what it predicts is what a run measures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_memopt
from benchmarks.lib.graphs import different
from lightning_memopt import optimize
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.allowed import config_of
from lightning_memopt.fitting.answer import Fit, answered
from lightning_memopt.fitting.cards import cards_of, of_the_host
from lightning_memopt.fitting.found import EARLY, TILES
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import record
from lightning_memopt.fitting.sources import of_training, source_of
from lightning_memopt.fitting.tiling import InTiles, recorded_in_tiles
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.session.tiling import Tiling
from lightning_memopt.solvers.frontier import UNSEEN_NBYTES
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.loops import counted_nbytes
from tests.cpu.lib.trainings import training_of
from tests.cpu.tiles.language_model import CLASSES, LanguageModel, batches

pytestmark = needs_tiles
STEPS = 9
ROUNDING_NBYTES = 64
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Build = Callable[[], Training]


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def with_a_metric(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    (logits.argmax(-1) == labels).float().mean().item()
    return F.cross_entropy(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


def distilled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.kl_div(logits.log_softmax(-1), torch.softmax(torch.ones_like(logits), -1), reduction="batchmean")


def with_loss(loss: Loss, frozen: bool = False) -> Build:
    def build() -> Training:
        torch.manual_seed(1)
        model, (ids, labels) = LanguageModel(), batches(1)[0]
        model.head.weight.requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        return training_of(model, optimizer, lambda: loss(model(ids)[0].view(-1, CLASSES), labels.view(-1)))

    return build


def of_transformers(kind: str, frozen: bool = False) -> Build:
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config, cls = transformers.LlamaConfig(vocab_size=32000, **sizes), transformers.LlamaForCausalLM
    else:
        sizes = {"n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        config, cls = transformers.GPT2Config(vocab_size=32000, **sizes), transformers.GPT2LMHeadModel

    def build() -> Training:
        torch.manual_seed(1)
        model = cls(config).train()
        model.get_output_embeddings().weight.requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ids = torch.randint(0, 32000, (4, 128))
        return training_of(model, optimizer, lambda: model(input_ids=ids, labels=ids).loss)

    return build


USUAL = with_loss(F.cross_entropy)
BUILDS = {
    "a small model": lambda: USUAL,
    "a frozen head": lambda: with_loss(F.cross_entropy, frozen=True),
    "a metric and a z-loss": lambda: with_loss(with_a_metric),
    "smoothed labels": lambda: with_loss(smoothed),
    "distillation": lambda: with_loss(distilled),
    "gpt2": lambda: of_transformers("gpt2"),
    "llama": lambda: of_transformers("llama"),
    "llama, frozen": lambda: of_transformers("llama", frozen=True),
}


def asked(build: Build, nbytes: int, tile: str = "exact", early: str = "never") -> Fit:
    source = of_training("a language model", lambda _: build(), None, "cpu")
    return answered(source, of_the_host(cards_of([str(nbytes)])), config=config_of("none", early, tile))


@pytest.mark.parametrize("name", BUILDS)
def test_the_peak_is_the_one_that_is_measured(name: str) -> None:
    """Beside a run with the least memory, whose tiles were compared; the smallest sizes have equal bits in these models."""
    build = BUILDS[name]()
    answer = asked(build, 1000)
    before_nbytes = counted_nbytes()
    training = build()
    with optimize(training.model, training.optimizer, budget="min", tile="exact", verbose=False) as run:
        for _ in range(STEPS):
            training.step()
        status = run.status()
    assert status.plan is not None and status.plan.tiles and status.measured_peak_nbytes is not None
    measured_nbytes = status.measured_peak_nbytes - before_nbytes
    assert 0 <= answer.smallest_nbytes - measured_nbytes <= UNSEEN_NBYTES + ROUNDING_NBYTES
    assert answer.peak_nbytes > 1.4 * answer.smallest_nbytes
    assert TILES in answer.cards[0].techniques


@pytest.mark.parametrize("name", ["a small model", "a frozen head", "smoothed labels"])
def test_the_steps_are_those_that_a_run_observes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each way in which they can run: ops, tensors and saves. Workspaces of the kernels themselves come on top."""
    build, real = BUILDS[name](), list[Graph]()
    whole = Tiling._cost

    def seen(self: Any, graph: Graph, *given: Any) -> Any:
        real.append(graph)
        return whole(self, graph, *given)

    monkeypatch.setattr(Tiling, "_cost", seen)
    training = build()
    with optimize(training.model, training.optimizer, budget="min", tile="exact", verbose=False):
        for _ in range(STEPS):
            training.step()
    steps = recorded_in_tiles(record(build).graph, lambda tiles: record(build, tiles=tiles).graph)
    assert len(steps) == len(real) - 1
    for step, observed in zip(sorted(steps, key=lambda step: not step.whole), real[1:], strict=True):
        assert not different(step.graph, observed)
        beyond = [max(levels) - levels[0] for levels in map(unmodified_levels, (step.graph, observed))]
        assert abs(beyond[0] - beyond[1]) <= UNSEEN_NBYTES  # other tests may have left something in this process


def test_a_run_keeps_the_budget_that_the_answer_promises() -> None:
    nbytes = (asked(USUAL, 1000).smallest_nbytes + asked(USUAL, 1000, tile="off").smallest_nbytes) // 2
    (on,) = asked(USUAL, nbytes).cards
    assert on.verdict == "plan" and TILES in on.techniques and on.peak_nbytes <= nbytes and on.slowdown > 1
    budget, training = nbytes + counted_nbytes(), USUAL()
    with optimize(training.model, training.optimizer, budget=budget, tile="exact", verbose=False) as run:
        for _ in range(STEPS):
            training.step()
        status = run.status()
    assert status.measured_peak_nbytes is not None and status.measured_peak_nbytes <= budget and not status.deviates


def test_where_nothing_else_fits_the_answer_says_so() -> None:
    nbytes = int(0.8 * asked(USUAL, 1000, tile="off").smallest_nbytes)
    answer = asked(USUAL, nbytes, tile="off")
    (on,) = answer.cards
    assert on.verdict == "no" and not on.tiles
    (other,) = on.others
    assert (other.tile, other.offload, other.optimizer_in_backward, other.missing_nbytes) == ("exact", "none", "never", 0)
    assert other.text.startswith("the step fits with tile='exact', x")
    assert "Bits of tiles are compared on the card itself" in answer.table()


def test_tiles_are_used_only_where_they_pay() -> None:
    plain = asked(USUAL, 1000, tile="off")
    (on,) = asked(USUAL, plain.peak_nbytes).cards
    assert on.verdict == "fits" and not on.tiles
    (on,) = asked(USUAL, (plain.peak_nbytes + plain.smallest_nbytes) // 2).cards
    assert on.verdict == "plan" and on.techniques == ("recompute",)


def test_the_faster_way_is_taken_where_it_fits() -> None:
    """A gradient that is whole once takes a product less."""
    small, large = (asked(USUAL, nbytes).cards[0] for nbytes in (asked(USUAL, 1000).smallest_nbytes, 6 << 20))
    assert [(on.tiles[0].rows, on.tiles[0].columns) for on in (small, large)] == [(16, 128), (16, 0)]
    assert large.slowdown < small.slowdown


def test_the_seconds_are_those_of_all_products() -> None:
    """Five of a head instead of three; four where the gradient is whole. With a frozen weight three instead of two."""
    (card,) = cards_of(["h100-80gb"])
    slow = dataclasses.replace(
        card, device=dataclasses.replace(card.device, bytes_per_second=1e30, launch_seconds=0.0, efficiency={})
    )
    for frozen, more in ((False, (2, 1)), (True, (1,))):
        build = with_loss(F.cross_entropy, frozen)
        plain = record(build).graph
        steps = recorded_in_tiles(plain, lambda tiles, build=build: record(build, tiles=tiles).graph)  # type: ignore[misc]
        product = slow.device.op_seconds(2 * 256 * CLASSES * 32, 0)
        seconds = [step.seconds(slow) - slow.timed(plain).step_seconds for step in steps]
        assert seconds == pytest.approx([n * product for n in more])


def test_the_largest_batch_is_that_of_a_plan_in_tiles() -> None:
    def build(n: int) -> Training:
        torch.manual_seed(1)
        model, ids = LanguageModel(), torch.zeros(n, 64, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        return training_of(model, optimizer, lambda: F.cross_entropy(model(ids)[0].view(-1, CLASSES), ids.view(-1)))

    def largest(tile: str, batch: int) -> tuple[int, str]:
        source = of_training("a language model", build, batch, "cpu")
        (on,) = answered(source, of_the_host(cards_of(["12MiB"])), config=config_of(tile=tile)).cards
        assert on.largest_planned_batch is not None
        return on.largest_planned_batch, on.verdict

    without, _ = largest("off", 4)
    most, _ = largest("exact", 4)
    assert most > 3 * without
    batch = most // 4 * 4  # of equal tiles
    assert largest("exact", batch)[1] == "plan" and largest("exact", batch + 8)[1] == "no"


def test_together_with_early_updates() -> None:
    alone = asked(USUAL, 1000).smallest_nbytes
    both = asked(USUAL, 1000, early="auto").smallest_nbytes
    assert both < alone
    (on,) = asked(USUAL, (alone + both) // 2, early="auto").cards
    assert on.verdict == "plan" and {TILES, EARLY} <= set(on.techniques)
    (other,) = asked(USUAL, (alone + both) // 2, tile="off").cards[0].others
    assert (other.tile, other.offload, other.missing_nbytes) == ("exact", "disk", 0)  # state that is parked is tried first
    (must,) = asked(USUAL, (alone + both) // 2, early="always").cards
    assert must.verdict == "plan" and {TILES, EARLY} <= set(must.techniques)


def test_the_table_and_json() -> None:
    answer = asked(USUAL, 1000)
    said = "In tiles: the loss head of head runs in tiles of 16 rows and 128 columns; 2.00 MiB of logits are never whole."
    assert said in answer.table() and "a run takes larger ones" in answer.table()
    (on,) = json.loads(json.dumps(answer.to_json()))["cards"]
    assert [(head["module"], head["rows"], head["columns"]) for head in on["tiles"]] == [("head", 16, 128)]
    (fits,) = asked(USUAL, 4 << 20).cards
    assert fits.techniques == (TILES,)
    text = dataclasses.replace(answer, cards=(fits,)).table()
    assert "fits by a plan:" in text and "│ loss head in tiles " in text


def test_a_plan_in_tiles_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="uses loss head in tiles, and only plans that recompute are written"):
        asked(USUAL, 4 << 20).save_plan(str(tmp_path / "plan.json"))


def test_where_no_head_runs_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain() -> Training:
        model, wanted = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4096)), torch.ones(256, 4096)
        loss = nn.functional.binary_cross_entropy_with_logits
        return training_of(model, torch.optim.Adam(model.parameters()), lambda: loss(model(torch.ones(256, 64)), wanted))

    assert "No loss head runs in tiles: no product of matrices was found" in asked(chain, 1000).table()
    assert "tiles" not in asked(chain, 1000, tile="off").table()
    monkeypatch.setattr("lightning_memopt.session.tiling.loaded", lambda: None)
    for tile in ("exact", "off"):
        answer = asked(USUAL, 1000, tile)
        assert "No loss head runs in tiles: the native engine is not there." in answer.table()
        assert answer.to_json()["whole"] and answer.cards[0].verdict == "no"
        assert not any(other.tile for other in answer.cards[0].others)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="tile is 'all'"):
        lightning_memopt.fit("nowhere.to.be:found", tile="all")


SCRIPT = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4096)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    ids = torch.randint(0, 4096, (512,)).to(device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(ids)
    loss = nn.functional.cross_entropy(logits.float(), ids)
    right = (logits.argmax(-1) == ids).float().mean().item()
    assert logits.is_cuda == (device == "cuda") and not logits.isnan().any()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_script_and_the_command(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine_in_tiles.py"
    script.write_text(SCRIPT)
    source = source_of(["python", str(script)], Options(device=device), ("a card", 1 << 34))
    plain = source.record(1, 1).graph
    assert source.tiled is not None
    (whole,) = [step for step in recorded_in_tiles(plain, lambda t: source.tiled(1, 1, tiles=t).graph) if step.whole]  # type: ignore
    assert whole.head.module == "3" and max(unmodified_levels(whole.graph)) < 0.6 * max(unmodified_levels(plain))
    assert whole.graph.device == device
    words = ["fit", "--device", device, "--tile", "exact", "--card", "1GiB", "--json", "--", "python", str(script)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["cards"][0]["verdict"] == "fits"


def test_a_step_of_which_nothing_runs_in_tiles() -> None:
    """The tiles of a step are those of its own head: a graph of another step names a module that is not there."""
    plain = record(USUAL).graph

    def other() -> Training:
        model = nn.Linear(4, 4)
        return training_of(model, torch.optim.SGD(model.parameters()), lambda: model(torch.ones(2, 4)).sum())

    with pytest.raises(ConfigError, match="no product of matrices was found"):
        record(other, tiles=InTiles(plain))
