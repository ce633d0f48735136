"""Which ops may run again on a device (rule R1): on CUDA, some whose rule allows it do not give the same bits twice."""

from __future__ import annotations

from functools import cache
from typing import Any

from lightning_memopt.device.determinism import DEPENDENT, cudnn_tunes, raises_where_it_varies, repeats_bits
from lightning_memopt.record.rules import rule_of, rules_generation
from lightning_memopt.torch_private import OpOverload


def may_run_again(func: OpOverload, device_type: str) -> bool:
    """Whether R1 lets the op run again on this type of device: it is not opaque, and the device gives the same bits again."""
    if rule_of(func).handling not in ("pure", "random", "empty"):
        return False
    name = _dependent(func)
    return name is None or repeats_bits(name, device_type)


@cache
def _dependent(func: OpOverload) -> str | None:
    """The name of the op if its bits depend on the device, else None."""
    name = func._schema.name.partition("::")[2]
    return name if name in DEPENDENT else None


def rules_in_force() -> tuple[Any, ...]:
    """A value that changes with every rule and every setting that decides which ops may run again. When it changes, earlier
    decisions are void.
    """
    return rules_generation(), raises_where_it_varies(), cudnn_tunes()
