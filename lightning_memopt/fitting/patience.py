"""How long a script may run until it is left: it says from time to time how far it is, and is left when its time is up."""

from __future__ import annotations

from collections.abc import Callable

from lightning_memopt import logs
from lightning_memopt.clocks import monotonic
from lightning_memopt.errors import ConfigError

LIMIT_SECONDS = 300.0
"""The default time limit."""
_TELLS_SECONDS = 30.0
"""How often a script says how far it is."""


class Patience:
    """The time that a script has, from now on.

    script: its name. limit_seconds: how long it may run.
    up: leaves the script; it is called, perhaps again, when the time is up.
    updates: how many updates it has made, and how many are needed.
    """

    def __init__(
        self, script: str, limit_seconds: float, up: Callable[[], None], updates: Callable[[], tuple[int, int]]
    ) -> None:
        self._script = script
        self._limit = limit_seconds
        self._up = up
        self._updates = updates
        self._began = self._told = monotonic()

    def look(self, operators: int) -> None:
        """Called often. `operators`: how many have run."""
        now = monotonic()
        if now - self._began > self._limit:
            self._up()
        if now - self._told > _TELLS_SECONDS:
            self._told = now
            made, wanted = self._updates()
            logs.say(
                f"MemOpt: after {now - self._began:.0f} s, {self._script} has made {made} of {wanted} updates, and "
                f"{operators:,} operators have run"
            )

    def error(self, operators: int) -> ConfigError:
        """Why the script was left when its time was up."""
        made, wanted = self._updates()
        return ConfigError(
            f"{self._script} has made {made} of {wanted} updates within {self._limit:.0f} s, in which {operators:,} operators "
            "ran without being computed. Make its steps shorter (shorter sequences, fewer evaluations before them, less "
            "accumulation, an optimizer that calls its closure once), or give it more time by --time-limit."
        )
