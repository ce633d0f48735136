"""Ask about the steps of a loop that a front runs (`fit_only`). The model is the user's, with its weights, and stays as is."""

from __future__ import annotations

from dataclasses import replace

from lightning_memopt.device.kinds import kind_of
from lightning_memopt.fitting.answer import Fit, answered
from lightning_memopt.fitting.cards import Card, cards_of, of_the_host
from lightning_memopt.fitting.recording import Observed, observing, recorded
from lightning_memopt.fitting.sources import Source
from lightning_memopt.fitting.techniques import check, config_of
from lightning_memopt.fitting.unfilled import SMALL, Unfilled
from lightning_memopt.integrations.asking import Observe, Within
from lightning_memopt.units import format_nbytes

_HOST_NBYTES = 1 << 62
"""On a card, none of the bytes that the process holds beside the step: they are the host's."""


def of_loop(name: str, observe: Observe, within: Within, device: str, nbytes: int | None, offload: str = "none") -> Fit:
    """The answer for steps on a device of this type. `nbytes`: of the budget; None: as many as the smallest plan needs.
    `offload`: the option of the run.
    """
    config, card = config_of(offload), _card(nbytes)
    check(config, device, [card])
    host = kind_of(device).is_host

    def watch(mode: Unfilled) -> Observed:
        with within(SMALL):
            graph, said = observe(observing())
        return Observed(graph, said, 0 if host else _HOST_NBYTES)

    found = recorded(watch, cuda=not host)
    source = Source(name, lambda *_: found, unsized="the loop alone knows it", device=device)
    return answered(source, [card], config=config)


def _card(nbytes: int | None) -> Card:
    """A card that is a budget."""
    (card,) = of_the_host(cards_of([f"{1 << 50 if nbytes is None else nbytes}"]))
    name = "any size" if nbytes is None else format_nbytes(nbytes)
    return replace(card, name=f"a budget of {name}")
