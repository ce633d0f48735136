"""What runs say, for tests: pytest's handlers are on the root logger, so nothing comes to stderr, and only warnings to them."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

from lightning_memopt.logs import LOGGER


class Said(io.StringIO):
    """The lines that were said, and which of them a test has looked at."""

    def taken(self) -> str:
        """What was said since this was called last."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@contextlib.contextmanager
def listening() -> Iterator[Said]:
    """Within, what runs of this process say."""
    said, level = Said(), LOGGER.level
    handler = logging.StreamHandler(said)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield said
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(handler)
