"""Steps recorded without arithmetic are the computed ones; OLLA's networks have the sizes that they are known by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.lib.sizes import Sizes, record
from benchmarks.models import vision
from benchmarks.models.registry import built
from benchmarks.papers import olla
from benchmarks.papers.olla_steps import step_of
from benchmarks.papers.olla_updates import ordered
from benchmarks.papers.olla_validate import faults_in_step
from lightning_memopt.graph import Graph


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9, foreach=False)


def _ops(graph: Graph) -> list[tuple[Any, ...]]:
    return [(o.name, o.phase, o.inputs, o.outputs, o.mutates, o.state_nbytes, o.at) for o in graph.ops]


def _tensors(graph: Graph) -> list[tuple[Any, ...]]:
    return [(t.nbytes, t.kind, t.storage, t.born_at, t.freed_at, t.size) for t in graph.tensors]


@pytest.mark.parametrize("name", ["gpt2", "t5", "densenet", "MnasNet-1.0"])
def test_a_step_without_arithmetic_is_the_computed_step(name: str) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return vision.built(name, 2) if name in vision.MODELS else built(name, 2)

    computed, sized = record(build, _sgd, computed=True), record(build, _sgd)
    assert _ops(computed) == _ops(sized) and _tensors(computed) == _tensors(sized)
    assert [s.released_at for s in computed.saves] == [s.released_at for s in sized.saves]
    assert len(sized.ops) > 400 and any(op.phase == "update" for op in sized.ops)


@pytest.mark.parametrize("name", vision.MODELS)
def test_networks_have_the_parameters_that_torchvision_documents(name: str) -> None:
    sizes = Sizes()
    sizes.enter()
    try:
        model: nn.Module = vision.MODELS[name]()
    finally:
        sizes.leave()
    assert sum(p.numel() for p in model.parameters()) == vision.PARAMETERS[name]


def test_the_best_order_of_a_real_step_keeps_its_memory_and_is_proven() -> None:
    """MnasNet at batch 1: updates are most of what another order saves, and nothing saves more."""
    graph = olla.step("MnasNet-1.0", 1)
    whole = step_of(graph)
    best, early_nbytes = ordered(whole.problem, whole.updates, seconds=30)
    assert best.peak_nbytes == best.bound_nbytes < early_nbytes < best.given_nbytes
    assert not faults_in_step(graph, whole.sequence(best.sequence))
    assert best.given_nbytes - early_nbytes > (best.given_nbytes - best.peak_nbytes) / 2
