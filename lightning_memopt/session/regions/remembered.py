"""Plans of compiled regions that kept a budget in an earlier run: the next run compiles these regions with them at once.

A file for each region and budget in the user's cache, named by a digest of the region's graph, the budget, and the version
of torch. A plan that is read is measured like any other before it is in force.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from lightning_memopt.compiled import Halves
from lightning_memopt.config import MemOptConfig
from lightning_memopt.cxx import cache
from lightning_memopt.plan import Life, RegionPlan
from lightning_memopt.session.regions.region_choice import Option
from lightning_memopt.session.regions.shared_regions import fields_of_option, option_of_fields

_FORMAT = 1
"""Version of the files. Raise it when regions are read or plans are written in another way: older files are then ignored."""


class Remembered:
    """The options of regions in files. `MEMOPT_CACHE=0` switches it off.

    enabled: whether files are read and written.
    recalled: key of a region -> its option that was read.
    """

    def __init__(
        self, budget_nbytes: int | None, config: MemOptConfig, enabled: bool, given: Sequence[RegionPlan] = ()
    ) -> None:
        """`given`: the regions of a plan that the user gave, which are compiled as it says."""
        self._given = {region.key: _option_of(region, region.lives) for region in given if region.lives is not None}
        self.enabled = enabled and os.environ.get("MEMOPT_CACHE") != "0"
        self.recalled: dict[str, Option] = {}
        self._budget = f"{budget_nbytes} {config.headroom}"

    @cached_property
    def _folder(self) -> Path:
        folder = cache() / "regions"
        folder.mkdir(exist_ok=True)
        return folder

    def _file(self, key: str) -> Path:
        text = f"{_FORMAT} {key} {self._budget} {torch.__version__}"
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def recall(self, key: str) -> tuple[Life, ...] | None:
        """The plan that the region with this key had in an earlier run, or None."""
        if key in self._given:
            self.recalled[key] = self._given[key]
            return self.recalled[key].lives
        if not self.enabled:
            return None
        try:
            self.recalled[key] = option_of_fields(json.loads(self._file(key).read_text()))
        except (OSError, ValueError, TypeError, KeyError):  # no file, or not a plan
            return None
        return self.recalled[key].lives

    def keep(self, key: str, option: Option) -> None:
        """Write it for the next run."""
        if not self.enabled:
            return
        with contextlib.suppress(OSError):
            file = self._file(key)
            written = file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(fields_of_option(option)))
            written.replace(file)


def _option_of(region: RegionPlan, lives: tuple[Life, ...]) -> Option:
    return Option(lives, Halves(region.saved_nbytes, region.peak_nbytes), region.extra_flops, region.rebuilt_ops)
