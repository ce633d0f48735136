"""`memopt fit --ranks`: the step of a rank whose neighbours do not exist is that of a rank that has them."""

from __future__ import annotations

import gc
import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import lightning_memopt
from benchmarks.lib.graphs import alone, different, peak_nbytes
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.recording import record
from lightning_memopt.fitting.sharding import blocks_of, of_a_card
from lightning_memopt.graph import HOOK, POOLS, Graph, graph_from_json
from lightning_memopt.native import install
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.solvers.planner import UNSEEN_NBYTES
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.torch_private import FAKE, fake_store
from tests.cpu.fitting.test_answer import config
from tests.cpu.lib.fit_ranks import CASES, WORLD, Odd, odd
from tests.cpu.lib.scripts import Interpreter
from tests.cpu.lib.sharded import Language
from tests.cpu.lib.written import needs_gloo, of_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")
_TRIES = 3
_KERNELS = 1024
"""Bytes that kernels of the CPU may take within a hook, for which torch's own bookkeeping makes small tensors."""


@pytest.fixture(scope="module")
def computed_by_ranks(tmp_path_factory: pytest.TempPathFactory, package_interpreter: Interpreter) -> list[dict[str, Any]]:
    return of_ranks(WORLD, "fit_ranks", tmp_path_factory.mktemp("ranks"), timeout=300, by=package_interpreter)


def hooks(graph: Graph) -> list[int]:
    """The workspace of each hook of a unit."""
    return [op.workspace_nbytes for op in graph.ops if op.name.startswith(HOOK)]


@needs_gloo
@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_the_one_of_a_rank_that_has_neighbours(computed_by_ranks: list[dict[str, Any]], case: str) -> None:
    """Ops, tensors, windows in which weights are gathered, saves, and the bytes of each purpose, to the byte. Within a hook,
    gloo has a copy of what it gathers or reduces: at most the bytes of one unit more.
    """
    theirs = of_a_card(graph_from_json(computed_by_ranks[0][case]))
    for _ in range(_TRIES):
        gc.collect()
        ours = record(CASES[case], ranks=WORLD).graph
        said = different(ours, theirs)
        if "aten::add_.Tensor" not in said:
            break
    else:
        pytest.skip(f"autograd adds to a gradient in place if nothing else refers to it, and something did each time: {said}")
    assert not said
    assert ours.windowed and peak_nbytes(ours) == peak_nbytes(theirs)
    purposes = [dict(at_peak(alone(graph), keep_all(graph)).by(1)) for graph in (ours, theirs)]
    assert purposes[0] == purposes[1] and {"weights", "optimizer state"} <= set(purposes[0])
    if install() is not None:
        copied = [real - made for made, real in zip(hooks(ours), hooks(theirs), strict=True)]
        unit = largest_unit_nbytes(Language(3) if case == "language" else Odd())
        assert all(0 <= nbytes <= unit + _KERNELS for nbytes in copied) and any(copied)


def largest_unit_nbytes(model: nn.Module) -> int:
    """Bytes of the weights of the largest unit, in float32."""
    blocks = [sum(p.nbytes for p in block.parameters()) for block in blocks_of(model)]
    return max(*blocks, sum(p.nbytes for p in model.parameters()) - sum(blocks))


def shard_nbytes(model: nn.Module, ranks: int) -> int:
    """Bytes of the first shard of each weight: its rows, divided and rounded up."""
    return sum(ceil(p.size(0) / ranks) * (p.numel() // p.size(0)) * p.element_size() for p in model.parameters())


def shards_of(graph: Graph) -> int:
    """Bytes of weights that are in memory during the whole step."""
    return sum(t.nbytes for t in graph.tensors if t.kind == "parameter" and t.id not in graph.windowed)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_holds_its_part_of_weights_and_of_optimizer_state(ranks: int) -> None:
    weights = shard_nbytes(Odd().to(torch.bfloat16), ranks)
    graph = record(odd, ranks=ranks).graph
    whole = sum(p.nbytes for p in Odd().to(torch.bfloat16).parameters())
    assert shards_of(graph) == weights and weights / whole == pytest.approx(1 / ranks, rel=0.5)
    state = dict(at_peak(graph, keep_all(graph)).by(1))["optimizer state"]
    assert 2 * weights <= state <= 2 * weights + 4 * 10, "two moments, and a counter for each of ten weights"


def test_eight_cards_have_an_eighth_each(tmp_path: Path) -> None:
    """Of a model whose weights eight divides."""
    answer = lightning_memopt.fit(
        str(config(tmp_path, n_embd=64, n_layer=4, vocab_size=512, n_positions=64)), ["1GiB"], (1, 8), length=16, dtype="fp32"
    )
    one, eight = (step.purposes["optimizer state"] for step in answer.steps)
    blocks_nbytes = 512 * 3 * (4 * 12 + 4)  # two moments and a counter for each weight, each in blocks of the allocator
    assert 0 <= eight - one / 8 < blocks_nbytes < one / 8


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", str(config(tmp_path)), "--length", "32", "--card", "1GiB", "--card", "2GiB", "--ranks", "1,2"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(c["card"], c["ranks"]) for c in answer["cards"]] == [("1GiB", 1), ("1GiB", 2), ("2GiB", 1), ("2GiB", 2)]
    assert [s["ranks"] for s in answer["steps"]] == [1, 2]
    one, two = answer["steps"]
    assert two["allocated_nbytes"] - two["purposes"][POOLS] < one["allocated_nbytes"]
    assert two["smallest_nbytes"] <= two["peak_nbytes"] + UNSEEN_NBYTES
    assert all(card["largest_batch"] > 0 for card in answer["cards"])
    assert not distributed.is_initialized()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "of each of 2 cards" in text and "Batch, length and peak are those of each card" in text


@pytest.mark.parametrize("ranks", [(), (0,), (2, -1)])
def test_numbers_that_make_no_sense(ranks: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give numbers of cards"):
        lightning_memopt.fit(str(config(tmp_path)), ranks=ranks)


def test_a_plan_is_for_one_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    assert main(["fit", str(config(tmp_path)), "--card", "1GiB", "--ranks", "2", "-o", path]) == 2
    assert "a plan is for one card: leave --ranks out" in capsys.readouterr().err and not Path(path).exists()


@pytest.mark.parametrize("source", ["some.module:build", ["python", "train.py"]])
def test_only_the_model_of_a_config_is_sharded(source: Any) -> None:
    with pytest.raises(ConfigError, match="shards its model itself: ask about several cards with the config of a model"):
        lightning_memopt.fit(source, ranks=(2,))


def test_an_optimizer_that_has_no_operators_for_shards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot update weights that FSDP2 shards"):
        lightning_memopt.fit(str(config(tmp_path)), ranks=(2,), optimizer="adafactor")


def test_the_group_ends_whatever_happens() -> None:
    def build() -> Training:
        assert distributed.get_world_size() == 4
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        record(build, ranks=4)
    assert not distributed.is_initialized()


def test_a_process_that_has_a_group_already() -> None:
    distributed.init_process_group(FAKE, store=fake_store(), rank=0, world_size=3)
    try:
        with pytest.raises(ConfigError, match="ask in another process"):
            record(odd, ranks=2)
        assert distributed.get_world_size() == 3, "it is left alone"
    finally:
        distributed.destroy_process_group()


def test_blocks_are_those_of_the_outermost_lists() -> None:
    model = nn.ModuleDict(
        {"stages": nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)] * 2)}) for _ in "ab")}
    )
    model["single"] = nn.ModuleList([nn.Linear(2, 2)])
    model["empty"] = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    assert blocks_of(model) == list(model["stages"])  # type: ignore[arg-type]


def test_mixed_precision_gathers_half_of_the_bytes(tmp_path: Path) -> None:
    """With FSDP2, weights are gathered in bfloat16, not under autocast in float32."""
    folder = str(config(tmp_path, n_embd=512, n_layer=2, vocab_size=512, n_positions=64))
    peaks = {
        dtype: lightning_memopt.fit(folder, ["1GiB"], (4,), batch=1, length=16, dtype=dtype).purposes["weights"]
        for dtype in ("fp32", "mixed-bf16")
    }
    assert peaks["mixed-bf16"] < 0.8 * peaks["fp32"]


def test_a_step_that_raises_is_said(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a step of .* raised ValueError: Cannot handle batch sizes > 1"):
        lightning_memopt.fit(str(tmp_path), ["1GiB"], task="sequence-classification", batch=2, length=8)
