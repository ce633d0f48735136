"""Codecs: saved tensors in fewer bytes. `codec(name)` returns the codec of a name; `NAMES` has all names."""

from __future__ import annotations

from lightning_memopt.errors import ConfigError
from lightning_memopt.runtime.codecs.base import Codec
from lightning_memopt.runtime.codecs.bits import BOOLS, POSITIVE
from lightning_memopt.runtime.codecs.block import RATES, Block
from lightning_memopt.runtime.codecs.quantise import Groups

_EVERY: list[Codec] = [BOOLS, POSITIVE, *map(Block, RATES), *(Block(rate, gated=True) for rate in RATES), Groups(8), Groups(4)]
_ALL = {c.name: c for c in _EVERY}
NAMES = tuple(_ALL)


def codec(name: str) -> Codec:
    """The codec of this name. Raises `ConfigError` if there is none."""
    named = _ALL.get(name)
    if named is None:
        raise ConfigError(f"there is no codec {name!r}; use one of {', '.join(NAMES)}")
    return named


__all__ = ["NAMES", "Codec", "codec"]
