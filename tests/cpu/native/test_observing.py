"""Observed steps are the same whether C++ or Python notes what ops read and make."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.graph import Graph, graph_to_json
from lightning_memopt.native import engine
from lightning_memopt.record import Tape, View
from lightning_memopt.runtime.engine.holding import Holding
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.trace.in_place import InPlace
from lightning_memopt.trace.seen import SeenTensor


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(InPlace, "op", lambda self, func, args: func)  # only the native engine knows which ops are in place
    if engine.loaded() is None:
        pytest.skip("there is no native engine: MEMOPT_NATIVE=0, or it cannot be built")
    return engine.loaded()


class Cells(nn.Module):
    """LSTM cells: gates that are parts of one storage, each overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(6, 8), torch.zeros(6, 8)
        for _ in range(3):
            state = self.cell(x, state)
        return self.head(state[0]).logsumexp(1).sum()


class Unusual(nn.Module):
    """Arguments that C++ leaves to Python: a sparse matrix, memory changed through `.data`, several results, raw memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).exp()
        h.data.mul_(0.5)
        values, indices = torch.topk(h, 3)
        mixed = torch.sparse.mm(torch.eye(6).to_sparse(), h)
        h = mixed + torch.from_numpy(values.detach().numpy().copy()).sum()
        return torch.stack([torch.cat([h, x], 1).sum(), values.sum(), indices.sum() * 0.0]).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 4)),
    "running statistics": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
    "cells": Cells,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "unusual": Unusual,
}


def observed(make: Callable[[], nn.Module], verify: bool, limit_nbytes: int) -> tuple[Graph, list[Tensor]]:
    """The graph of the second of two observed steps, and the parameters after it."""
    torch.manual_seed(1)
    model, x = make(), torch.randn(6, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        observation = Observation(model, [optimizer], torch.device("cpu"), limit_nbytes, verify, meter=False)
        with observation.begin_round(x):
            loss = model(x).sum()
        observation.forward_ended()
        loss.backward()
        del loss
        observation.update_begins()
        optimizer.step()
        optimizer.zero_grad()
        graph = observation.finish()
    assert graph is not None
    return graph, [p.detach() for p in model.parameters()]


def data(graph: Graph) -> dict[str, Any]:
    """A graph without its times."""
    columns = graph_to_json(graph) | {"step_seconds": 0.0}
    columns["ops"] = columns["ops"] | {"seconds": 0}
    return columns | {"lines": dict(graph.lines), "save_lines": dict(graph.save_lines)}


@pytest.mark.parametrize("limit_nbytes", [1 << 40, 1], ids=["roomy", "evicting"])
@pytest.mark.parametrize("name", MODELS)
def test_both_see_the_same_step(name: str, limit_nbytes: int, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, values = observed(MODELS[name], True, limit_nbytes)
    monkeypatch.setattr(engine, "_module", None)
    of_python, expected = observed(MODELS[name], True, limit_nbytes)
    assert data(graph) == data(of_python)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_python_answers_for_unknown_tensors_and_nothing_was_noted(module: Any) -> None:
    tape: Tape[Holding] = Tape(Holding, module)
    known, unknown = torch.randn(2, 3), torch.randn(3)
    version = tape.version(7, known)
    of_storage, reads = module.Versions(), [version]
    of_storage[version.weak] = version
    for values in ((known, unknown), ([known, [unknown]],), (known, unknown.to_sparse())):
        assert module.captured(values, of_storage, True, reads) is None and reads == [version]
    kept = module.captured((known.t(), [known, None], 2.5), of_storage, True, reads)
    assert reads == [version] * 3 and kept[2] == 2.5 and kept[1][1] is None
    assert isinstance(kept[0], View) and kept[0].version == 7 and kept[0].same(known.t())
    assert module.captured((known, 1), of_storage, False, reads) is True and len(reads) == 4


def test_new_results_have_their_positions(module: Any) -> None:
    tape: Tape[Holding] = Tape(Holding, module)
    known, new = torch.randn(2), torch.randn(2)
    of_storage = module.Versions()
    of_storage[known.untyped_storage()._cdata] = tape.version(0, known)
    results = module.fresh((known, None, [new, new.to_sparse()], new), of_storage)
    assert [at for at, _ in results] == [1, 3] and all(t is new for _, t in results)
    assert module.fresh(known, of_storage) == []


def test_rows_are_whole_and_hidden(module: Any) -> None:
    made = engine.maker(SeenTensor)("a", 1, "activation", 2, 3, None, "", (), (), None)
    assert made == SeenTensor("a", 1, "activation", 2, 3) and not gc.is_tracked(made)
    with pytest.raises(RuntimeError, match="a value for each field"):
        module.row(SeenTensor, "a")
