"""The cards that a step is planned for, and how long its ops take on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_memopt.errors import BudgetError, ConfigError
from lightning_memopt.graph import Graph, Op
from lightning_memopt.plan.rates import Device, MachineRates, profile, profiles
from lightning_memopt.units import parse_budget

CARDS = ("rtx4090-24gb", "a100-40gb", "l40s-48gb", "h100-80gb", "pcie5-141gb", "mi300x-192gb")
"""The profiles of the cards that are asked about if the user names none."""
CONTEXT_NBYTES = 512 << 20
"""What a process takes of a card beside torch's allocator: its context and the libraries' own memory. A process with 11.13 GiB
in use, of which torch had reserved 10.64, took 0.49 GiB (github.com/NVlabs/Eagle issue 68).
"""
_LARGEST = 1 << 62
"""Maximum number of bytes of a card."""
_ASSUMED = "h100-80gb"
"""The profile whose rates are taken for a card of which only the bytes are given."""


@dataclass(frozen=True)
class Card:
    """A card.

    name: what it is called in answers.
    device: its bytes and its rates.
    context_nbytes: what a process takes of it beside torch's allocator.
    rates: of its links to the host and to a disk; None if they are not known.
    """

    name: str
    device: Device
    context_nbytes: int = CONTEXT_NBYTES
    rates: MachineRates | None = None

    @property
    def usable_nbytes(self) -> int:
        """Bytes for the step."""
        return self.device.nbytes - self.context_nbytes - self.device.workspace_nbytes

    def timed(self, graph: Graph) -> Graph:
        """The graph with the seconds that its ops take on this card, by the roofline model."""
        ops = tuple(replace(op, seconds=self._seconds(graph, op)) for op in graph.ops)
        return replace(graph, ops=ops, step_seconds=sum(op.seconds for op in ops))

    def _seconds(self, graph: Graph, op: Op) -> float:
        written = {*op.outputs, *(new for _, new in op.mutates)}
        if not written and not op.flops:
            return 0.0  # a view
        read = [graph.tensors[t] for t in {*op.inputs, *written}]
        dtypes = {t.dtype for t in read}
        dtype = next((d for d in ("float32", "bfloat16", "float16") if d in dtypes), "float32")
        return self.device.op_seconds(op.flops, sum(t.nbytes for t in read), dtype, op.name)


def cards_of(names: Sequence[str]) -> tuple[Card, ...]:
    """The cards with these names: a profile of the package, a file of rates, or bytes ("24GiB").

    Raises ConfigError for a name that is none of these.
    """
    return tuple(map(_card, names or CARDS))


def of_the_host(cards: Sequence[Card]) -> tuple[Card, ...]:
    """These cards' bytes as memory of the host, where neither a context nor workspaces of cuBLAS take a part."""
    return tuple(replace(card, context_nbytes=0, device=replace(card.device, workspace_nbytes=0)) for card in cards)


def _card(name: str) -> Card:
    if name in profiles() or Path(name).is_file():
        rates = profile(name) if name in profiles() else MachineRates.read(name)
        if rates.device is None:
            raise ConfigError(
                f"the rates {name!r} are of links alone: there is no card in them. Give bytes, or one of {', '.join(CARDS)}"
            )
        return Card(rates.name, rates.device, rates=rates)
    try:
        nbytes = parse_budget(name, _LARGEST)
    except BudgetError:
        known = ", ".join(profiles())
        raise ConfigError(f"{name!r} is no card: give bytes (24GiB), a file of rates, or one of {known}") from None
    assumed = profile(_ASSUMED)
    assert assumed.device is not None
    return Card(name, replace(assumed.device, nbytes=nbytes), rates=assumed)
