"""The door to the user (logs.py) for runs in Lightning: the first rank's, silent with the level of Lightning's own lines."""

from __future__ import annotations

import logging

from lightning.fabric.utilities.rank_zero import rank_zero_module, rank_zero_only

from lightning_memopt import logs


@rank_zero_only
def rank_zero_say(text: str) -> None:
    """As `logs.say`, on the first rank. Says nothing where `rank_zero_info` would not: users silence `lightning.pytorch`."""
    silenced = logging.getLogger("lightning.pytorch").level > logging.INFO  # the last package that was imported owns the other
    if rank_zero_module.log.isEnabledFor(logging.INFO) and not silenced:
        logs.say(text)
