"""Which ops may run again on a device (rule R1): on CUDA, some whose rule allows it do not give the same bits twice."""

from __future__ import annotations

from functools import cache
from typing import Any

from lightning_memopt.device.determinism import DEPENDENT, cudnn_tunes, raises_where_it_varies, repeats_bits
from lightning_memopt.record.rules import rule_of, rules_generation
from lightning_memopt.torch_private import OpOverload


def may_run_again(func: OpOverload, device_type: str) -> bool:
    """R1 on this type of device: the op is not opaque, and the device gives the same bits again."""
    if rule_of(func).handling not in ("pure", "random", "empty"):
        return False
    name = _dependent(func)
    return name is None or repeats_bits(name, device_type)


@cache
def _dependent(func: OpOverload) -> str | None:
    """The name of an op whose bits depend on the device; None for others."""
    name = func._schema.name.partition("::")[2]
    return name if name in DEPENDENT else None


def rules_in_force() -> tuple[Any, ...]:
    """Changes whenever a rule does, or a setting that says which ops may run again: conclusions from older ones are void."""
    return rules_generation(), raises_where_it_varies(), cudnn_tunes()
