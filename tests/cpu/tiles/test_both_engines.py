"""Random programs with a loss head in tiles, under random plans, recorded by the native engine and in Python: the bits of the
plain program, also where a step departs from its plan.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.robustness.fuzzing.case import Case, Departure, draw
from benchmarks.robustness.fuzzing.ops import WIDTH
from benchmarks.robustness.fuzzing.programs import Data, Expected, Model
from benchmarks.robustness.fuzzing.runs import random_frontier
from lightning_memopt import optimize
from lightning_memopt.native import engine
from lightning_memopt.runtime.tiles import hollow
from lightning_memopt.session import tiling
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.solve import solving
from tests.cpu.lib.engines import needs_tiles
from tests.cpu.lib.inside import current_of
from tests.cpu.tiles.language_model import CLASSES

pytestmark = needs_tiles
ROWS, STEPS, DEPARTS = 8, 9, 6
_IN_BODY = ("skip", "extra", "other", "data", "hold", "in place", "no grad", "draw", "copy", "raise", "inner", "flags")
_AT_HEAD = ("data", "hold", "numpy", "in place", "raise", "collect", "flags", "argmax", "square")


class Headed(Model):
    """A program, and a head that classifies sixteen tokens of each row. `at_head`: how it departs there."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False)
        self.at_head = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.values(x)[-1].float().flatten(1)[:, :WIDTH]
        logits = self.head((last[:, None] * torch.linspace(0.5, 2, 16)[:, None]).tanh())
        with torch.backends.mkldnn.flags(enabled=False) if self.at_head == "flags" else contextlib.nullcontext():
            extra = self._reads(logits)
        target = torch.arange(logits.shape[0] * 16) * 7 % CLASSES
        return F.cross_entropy(logits.flatten(0, 1), target) + extra

    def _reads(self, logits: torch.Tensor) -> torch.Tensor | float:
        if self.at_head == "raise":
            raise Expected
        if self.at_head in ("data", "in place"):
            (logits.data if self.at_head == "data" else logits)[:, 1:3].mul_(0.5)
        if self.at_head in ("hold", "flags", "collect"):
            self.kept.append(logits)
        if self.at_head == "numpy":
            return float(logits.detach().numpy().max())
        if self.at_head == "argmax":
            return logits.detach().argmax(-1).float().mean()
        return logits.square().mean() if self.at_head == "square" else 0.0


def _trained(case: Case, departure: Departure, at_head: str, planned: bool) -> tuple[list[Any], int]:
    """Losses or errors, logits that were held, weights and the generator; and how many planned forwards ran in tiles."""
    model = Headed(case)
    data = Data(case.seed)
    left = list[Any]()
    tiled = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"budget": "min", "tile": "exact", "profile_steps": 1, "verbose": False, "on_exceed": "warn"}
    torch.manual_seed(case.seed)
    with optimize(model, optimizer, **options) if planned else contextlib.nullcontext() as run:
        for step in range(STEPS):
            departs = step == DEPARTS
            model.departures = {departure.node: departure} if departs else {}
            model.at_head, model.kept = at_head if departs else "", []
            try:
                loss = model(data.batch(ROWS))
                loss.backward()
                left += [loss.detach(), *(t.detach().clone() for t in model.kept)]
                del loss
                optimizer.step()
            except (Expected, RuntimeError) as error:  # of autograd: the departure writes to what it has saved
                left.append(str(error)[:40])
            if run is not None and isinstance(current_of(run), Running):
                mode = run.session._tiling.mode
                tiled += bool(run.plan.tiles) and (mode is None or mode.outcome.heads > 0)
            optimizer.zero_grad()
        model.kept = []
    return [*left, *(t.detach().clone() for t in model.state_dict().values()), torch.get_rng_state()], tiled


@contextlib.contextmanager
def _in_python():
    """Recorders and plans run in Python; tensors without bytes are made by the native engine all the same."""
    native = engine.loaded()
    with (
        engine.without(),
        mock.patch.object(hollow, "loaded", lambda: native),
        mock.patch.object(tiling, "loaded", lambda: native),
    ):
        yield


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_in_tiles(seed):
    rng = random.Random(seed)
    case = replace(draw(seed), away=False)
    if seed % 2:
        departure, at_head = Departure(len(case.nodes), "", 0), rng.choice(_AT_HEAD)
    else:
        departure, at_head = Departure(rng.randrange(len(case.nodes)), rng.choice(_IN_BODY), rng.randrange(8)), ""
    with warnings.catch_warnings(), mock.patch.object(solving, "frontier_of", lambda graph, *_: random_frontier(case, graph)):
        warnings.simplefilter("ignore")
        plain, _ = _trained(case, departure, at_head, planned=False)
        for how in (contextlib.nullcontext, _in_python):
            with how():
                found, tiled = _trained(case, departure, at_head, planned=True)
            assert tiled, how
            for ours, theirs in zip(found, plain, strict=True):
                assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
