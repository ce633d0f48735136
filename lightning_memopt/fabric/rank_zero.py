"""Messages (logs.py) of runs in Lightning: only on the first rank, and not if Lightning's own lines are silenced."""

from __future__ import annotations

import logging

import lightning_utilities.core.rank_zero as rank_zero_module
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_memopt import logs


@rank_zero_only
def rank_zero_say(text: str) -> None:
    """Like `logs.say`, on the first rank. Says nothing if `rank_zero_info` would say nothing, because users silence that."""
    # Lightning's other functions log to the logger of the package that was imported last
    silenced = any(logging.getLogger(name).level > logging.INFO for name in ("lightning.pytorch", "pytorch_lightning"))
    if rank_zero_module.log.isEnabledFor(logging.INFO) and not silenced:
        logs.say(text)
