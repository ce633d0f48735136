"""Ask about the steps of a loop that a front runs (`fit_only`). The model is the user's, with its weights, and stays as is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.fitting.allowed import GivenBudget, config_of
from lightning_memopt.fitting.answer import Fit, answered
from lightning_memopt.fitting.cards import Card, cards_of, of_the_host
from lightning_memopt.fitting.recording import Observed, Recorded, observing, recorded
from lightning_memopt.fitting.sources import Source
from lightning_memopt.fitting.techniques import check
from lightning_memopt.fitting.tiling import InTiles
from lightning_memopt.fitting.unfilled import SMALL, Unfilled
from lightning_memopt.integrations.asking import Observe, Within
from lightning_memopt.units import format_nbytes

_HOST_NBYTES = 1 << 62
"""On a card, none of the bytes that the process holds beside the step: they are the host's."""


def of_loop(
    name: str,
    observe: Observe,
    within: Within,
    device: str,
    nbytes: int | None,
    offload: str = "none",
    tile: str = "exact",
    budgets: Mapping[str, GivenBudget] = MappingProxyType({}),
) -> Fit:
    """The answer for steps on a device of this type. `nbytes`: of the budget; None: as many as the smallest plan needs.
    `offload`, `tile`: the options of the run. `budgets`: those of tiers.
    """
    config, card = config_of(offload, tile=tile, budgets=budgets), _card(nbytes)
    check(config, device, [card])
    host = kind_of(device).is_host

    def watch(tiles: InTiles | None, mode: Unfilled) -> Observed:
        with within(SMALL), contextlib.nullcontext() if tiles is None else tiles.assumed(mode):
            graph, said = observe(observing(tiled=tiles is not None))
        return Observed(graph, said, 0 if host else _HOST_NBYTES)

    def recording(tiles: InTiles | None = None) -> Recorded:
        return recorded(partial(watch, tiles), cuda=not host)

    found = recording()
    source = Source(
        name,
        lambda *_: found,
        unsized="the loop alone knows it",
        device=device,
        tiled=lambda *_, tiles: recording(tiles),
    )
    return answered(source, [card], config=config)


def _card(nbytes: int | None) -> Card:
    """A card that is a budget."""
    (card,) = of_the_host(cards_of([f"{1 << 50 if nbytes is None else nbytes}"]))
    name = "any size" if nbytes is None else format_nbytes(nbytes)
    return replace(card, name=f"a budget of {name}")
