"""The door to the user (logs.py) for runs in Lightning: the first rank's, silent with the level of Lightning's own lines."""

from __future__ import annotations

import logging

import lightning_utilities.core.rank_zero as rank_zero_module
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_memopt import logs


@rank_zero_only
def rank_zero_say(text: str) -> None:
    """As `logs.say`, on the first rank. Says nothing where `rank_zero_info` would not: users silence it."""
    # the last package that was imported owns the logger of the other functions
    silenced = any(logging.getLogger(name).level > logging.INFO for name in ("lightning.pytorch", "pytorch_lightning"))
    if rank_zero_module.log.isEnabledFor(logging.INFO) and not silenced:
        logs.say(text)
