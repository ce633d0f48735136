"""A process of `python -m lightning_memopt.fabric run`: registers the strategies with the options, and runs the script."""

from __future__ import annotations

import os
import sys

from lightning_memopt.integrations import launch, wire
from lightning_memopt.integrations.lightnings import register

if __name__ == "__main__":
    register("lightning.fabric", **wire.options_of(wire.in_environment(os.environ) or {}))
    launch.run(sys.argv[1], sys.argv[2:], module=False)
