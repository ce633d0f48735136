"""What a run would park on a card that is not here."""

from __future__ import annotations

from functools import cached_property

import torch

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.session.parking.offloading import Offloading


class OfCard(Offloading):
    """What a session on a card may park. No device is there on which links could be measured: their rates are the card's. How
    much its machine has left is not known: only budgets limit what is parked.
    """

    def __init__(self, device: str, config: MemOptConfig, rates: MachineRates) -> None:
        super().__init__(torch.device(device), config)
        self._of_card = rates
        self.depots.limit_nbytes = config.tier_budget_nbytes(self.tier, 1 << 62)

    @cached_property
    def rates(self) -> MachineRates:
        return self._of_card

    @property
    def shares_memory(self) -> bool:
        return kind_of(self.device.type).is_host  # whatever device is here

    def more_helps(self, nbytes: int) -> bool:
        return True


def tier_of(device: str, config: MemOptConfig) -> str:
    """The tier in which a run on such a device parks; "" if none."""
    return OfCard(device, config, MachineRates(name="", links={}, codecs={})).tier
