"""How PyTorch's caching allocator for CUDA rounds and splits: its defaults, unless `PYTORCH_CUDA_ALLOC_CONF` or the allocator
itself says otherwise.

Text such as `expandable_segments:True,max_split_size_mb:256,roundup_power2_divisions:[64:8,>:4]` goes in, a frozen `Settings`
comes out. Options that do not change how many bytes are reserved are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memopt.device.kinds import CUDA
from lightning_memopt.errors import ConfigError
from lightning_memopt.units import ceil_div

MIB = 1 << 20
MIN_BLOCK_NBYTES = CUDA.block_nbytes
"""Sizes are rounded up to multiples of this."""
SMALL_NBYTES = MIB
"""The largest request that is served from the pool of small blocks."""
SMALL_SEGMENT_NBYTES = 2 * MIB
LARGE_REQUEST_NBYTES = 10 * MIB
"""A request of this size or more that finds no free block gets a segment of its own size."""
SEGMENT_ROUND_NBYTES = 2 * MIB
_INTERVALS = 16
"""Number of intervals of sizes that each have a rounding of their own, to parts of a power of two: 1 MiB, 2 MiB, ... 32 GiB and
above."""
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that decide how many bytes are reserved.

    max_split_nbytes: blocks of that size or more are not split; None: all are.
    max_non_split_rounding_nbytes: a request of `max_split_nbytes` or more takes only blocks that are larger by less than this.
    divisions: for each interval, into how many parts a power of two is cut for rounding; 0: no such rounding.
    gc_threshold: if more than this share of the allowed memory is reserved, unused segments are given back before a new one is
        taken; 0: never.
    large_segment_nbytes: the segment of requests above 1 MiB and below 10 MiB, and the unit in which an expandable segment of
        large blocks grows.
    """

    expandable: bool = False
    max_split_nbytes: int | None = None
    max_non_split_rounding_nbytes: int = 20 * MIB
    divisions: tuple[int, ...] = field(default=(0,) * _INTERVALS)
    gc_threshold: float = 0.0
    large_segment_nbytes: int = 20 * MIB

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings that torch reads from the environment of the process."""
        variables = os.environ if environment is None else environment
        return cls.parse(next((variables[name] for name in _VARIABLES if name in variables), ""))

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Settings of `key:value,...`. Raises ConfigError for a value that torch would refuse too."""
        settings = cls()
        for key, value in re.findall(r"([A-Za-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]*)", text):
            try:
                settings = _with(settings, key, value.strip())
            except ValueError as error:
                raise ConfigError(
                    f"the allocator's setting {key}:{value} cannot be read: {error}. Set it right in PYTORCH_CUDA_ALLOC_CONF."
                ) from None
        return settings

    @classmethod
    def of_allocator(cls, said: Mapping[str, Any]) -> Settings:
        """The settings that the allocator itself reports: "allocator_settings" of `torch.cuda.memory._snapshot()`.

        Some settings have no entry of their own, only the text that was set last, and it may leave them out. Other entries take
        precedence over the text. Raises ConfigError as `parse` does.
        """
        settings = cls.parse(str(said.get("PYTORCH_CUDA_ALLOC_CONF", "")))
        if "expandable_segments" in said:
            settings = replace(settings, expandable=bool(said["expandable_segments"]))
        if "max_split_size" in said:
            most = int(said["max_split_size"])
            settings = replace(settings, max_split_nbytes=most if most > 0 else None)
        if "garbage_collection_threshold" in said:
            settings = replace(settings, gc_threshold=float(said["garbage_collection_threshold"]))
        divisions = said.get("roundup_power2_divisions", {})
        if len(divisions) == _INTERVALS:
            settings = replace(settings, divisions=tuple(divisions[key] for key in sorted(divisions, key=int)))
        return settings

    def rounded(self, nbytes: int) -> int:
        """The bytes of the block for a request of `nbytes`."""
        if nbytes < MIN_BLOCK_NBYTES:
            return MIN_BLOCK_NBYTES
        divisions = self.divisions[min(max(nbytes.bit_length() - 21, 0), _INTERVALS - 1)]
        unit = MIN_BLOCK_NBYTES
        if divisions > 1 and nbytes > MIN_BLOCK_NBYTES * divisions:
            unit = (1 << (nbytes.bit_length() - 1)) // divisions
        return ceil_div(nbytes, unit) * unit

    def segment_nbytes(self, rounded: int) -> int:
        """Bytes of the segment that is taken from the device if no free block has `rounded` bytes."""
        if rounded <= SMALL_NBYTES:
            return SMALL_SEGMENT_NBYTES
        if rounded < LARGE_REQUEST_NBYTES:
            return self.large_segment_nbytes
        return ceil_div(rounded, SEGMENT_ROUND_NBYTES) * SEGMENT_ROUND_NBYTES

    def page_nbytes(self, small: bool) -> int:
        """The unit in which an expandable segment grows and shrinks."""
        return SMALL_SEGMENT_NBYTES if small else self.large_segment_nbytes


def _with(settings: Settings, key: str, value: str) -> Settings:
    if key == "expandable_segments":
        if value.lower() not in ("true", "false"):
            raise ValueError("True or False is expected")
        return replace(settings, expandable=value.lower() == "true")
    if key == "max_split_size_mb":
        return replace(settings, max_split_nbytes=_mebibytes(value))
    if key == "max_non_split_rounding_mb":
        return replace(settings, max_non_split_rounding_nbytes=_mebibytes(value))
    if key == "large_segment_size_mb":
        return replace(settings, large_segment_nbytes=_mebibytes(value))
    if key == "garbage_collection_threshold":
        threshold = float(value)
        if not 0 < threshold < 1:
            raise ValueError("a share between 0 and 1 is expected")
        return replace(settings, gc_threshold=threshold)
    if key == "roundup_power2_divisions":
        return replace(settings, divisions=_divisions(value))
    return settings


def _mebibytes(value: str) -> int:
    if int(value) < 20:
        raise ValueError("at least 20 is expected")
    return int(value) * MIB


def _divisions(value: str) -> tuple[int, ...]:
    """`4` for all intervals, or `[64:8,256:4,>:1]`: from an interval in MiB to its divisions. `>` stands for all intervals
    after the last one that is named. Intervals before the first one that is named have the divisions of that one.
    """
    if not value.startswith("["):
        return (_power_of_two(value),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = -1
    for entry in filter(None, value.strip("[]").replace(" ", "").split(",")):
        where, _, count = entry.partition(":")
        parts = int(count) and _power_of_two(count)
        if where == ">":
            divisions[last + 1 :] = [parts] * (_INTERVALS - last - 1)
            continue
        at = min(_power_of_two(where).bit_length() - 1, _INTERVALS - 1)
        if last < 0:
            divisions[:at] = [parts] * at
        divisions[at] = parts
        last = at
    return tuple(divisions)


def _power_of_two(value: str) -> int:
    number = int(value)
    if number < 1 or number & (number - 1):
        raise ValueError(f"{number} is not a power of two")
    return number
