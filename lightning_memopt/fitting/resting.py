"""What rests in a training that is asked about, and may be parked: optimizer state between updates, gradients from backward to
the update, and weights while other modules run. It is what a run would park (`session/at_rest.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.graph import Graph
from lightning_memopt.logs import silent
from lightning_memopt.plan import StateParking, WeightParking, states_text, weights_text
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.plan.resting import Rests
from lightning_memopt.plan.states import Chunk, StateOf, may_be_parked
from lightning_memopt.plan.weights import all_of, movable, read_units
from lightning_memopt.session.at_rest import AtRest
from lightning_memopt.session.observe.accumulated import Kept
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Parts

if TYPE_CHECKING:
    from lightning_memopt.session.session import Session


def _alone() -> bool:
    return True


@dataclass(frozen=True)
class Resting:
    """What rests, by names: any step of the training has it.

    weights: path of a module -> the name of each of its weights, and whether it is trained.
    states: optimizer state and gradients, without seconds of copies.
    chunks: those of each optimizer's step in which all of this state is parked.
    """

    weights: Mapping[str, Mapping[str, bool]]
    states: tuple[StateOf, ...]
    chunks: tuple[tuple[Chunk, ...], ...]

    @classmethod
    def of(cls, session: Session, graph: Graph) -> Resting:
        """What rests in the training of a session, of which this step was observed."""
        offloading = Offloading(session.device, MemOptConfig(offload="disk"))  # nothing goes there
        at_rest = AtRest(session.model, session.optimizers, offloading, _alone, silent, Parts(), frozenset(), Kept())
        states = at_rest.states.found(graph, timed=False)
        units = at_rest.weights.may_be_parked()
        weights = {path: {name: w.requires_grad for name, w in own.items()} for path, own in units.items()}
        chunks = at_rest.states.chunks(graph, Rests(tuple(states), tuple(at_rest.weights.found(graph, timed=False))))
        return cls(weights, tuple(states), tuple(map(tuple, chunks)))

    def on_card(self, graph: Graph, tier: str, rates: MachineRates) -> Rests:
        """What this step may park, and how long the copies take on a card. `graph`: the step as it is, with the seconds of its
        ops there. `rates`: those of the card's links.
        """
        blocks = kind_of(graph.device).allocated_nbytes
        can_move, _ = movable(graph, read_units(graph, self.weights))

        def timed(state: StateOf) -> StateOf:
            out, back = (sum(each(tier, n) for n in state.sizes) for each in (rates.out_seconds, rates.in_seconds))
            parking = replace(state.parking, tier=tier, copy_seconds=out + back, seconds=out + back)
            return StateOf(parking, tuple(map(blocks, state.sizes)), back)

        states = map(timed, may_be_parked(graph, self.states))
        return Rests(tuple(states), tuple(all_of(graph, can_move, tier, rates)))


def resting_text(states: tuple[StateParking, ...], weights: tuple[WeightParking, ...]) -> str:
    """A text: what is parked, and how a loop puts such a model on a card; "" if nothing is."""
    texts = [states_text(states)] if states else []
    if weights:
        texts.append(f"{weights_text(weights)}: put the model on the card by to_device(model)")
    return "; ".join(texts)
