"""Exactness over torch's own table of modules, in training: outputs, gradients, buffers and the generator, bit by bit."""

from __future__ import annotations

import contextlib
import functools
import string
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.lib.sweeps import Count, Ran, assert_none_differs, run, sweep, total, verdict

from torch.testing._internal.common_modules import module_db  # isort: skip  # after the stub for expecttest

SAMPLES = 32
# torch asks whether a dispatch mode is on (`isTensorSubclassLike`), whoever set it, and then adds up in another order. Samples
# of these modules are compared with a plain run under a mode that does nothing.
OTHER_BRANCH = {"nn.LinearCrossEntropyLoss": "label smoothing with class weights: masked_select becomes masked_fill"}
GROUPS = ("A", "B", "C", "D-H", "I-L", "M", "N-R", "S-Z")


def _group(info: Any) -> str:
    letter = info.module_cls.__name__[0]
    return next(g for g in GROUPS if letter in string.ascii_uppercase[ord(g[0]) - 65 : ord(g[-1]) - 64])


class Idle(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def _step(info: Any, sample: Any, drop: bool, where: str, device: str, dtype: torch.dtype) -> Ran:
    torch.manual_seed(11)
    built, given = sample.constructor_input, sample.forward_input
    module = info.module_cls(*built.args, **built.kwargs).to(device, dtype).train()
    if info.is_lazy:
        with torch.no_grad():
            module(*given.args, **given.kwargs)  # makes its parameters
    leaves = [p for p in module.parameters() if p.requires_grad]
    with Idle() if info.name in OTHER_BRANCH and not drop else contextlib.nullcontext():
        ran = run(
            lambda args, kwargs: module(*args, **kwargs), (given.args, given.kwargs), drop=drop, where=where, leaves=leaves
        )
    ran.extra = {f"buffer {name}": b.detach().clone() for name, b in module.named_buffers()}
    return ran


@functools.cache
def swept(group: str) -> Count:
    """Verdicts over the modules of one group."""
    return sweep((info for info in module_db if _group(info) == group), sweep_module)


def sweep_module(info: Any, count: Count, device: str = "cpu", dtype: torch.dtype = torch.float32, most: int = SAMPLES) -> None:
    """Verdicts for the samples of a module, up to a maximum number of samples."""
    found = Count()
    torch.manual_seed(3)
    samples = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True)
    for i, sample in list(enumerate(samples))[:: max(1, -(-len(samples) // most))]:
        if sample.forward_input is not None:
            label = f"{info.name} #{i} {sample.desc}"
            verdict(lambda drop, s=sample, x=label: _step(info, s, drop, x, device, dtype), label, found)  # type: ignore[misc]
    count.different |= found.different
    count.skipped |= found.skipped
    if not found.different:
        (count.dropped if found.dropped else count.nothing).append(info.name)


@pytest.mark.parametrize("group", GROUPS)
def test_p1_no_module_differs(group: str) -> None:
    assert_none_differs(swept(group))


def test_enough_was_dropped() -> None:
    found = total(swept(group) for group in GROUPS)
    print(
        f"equal with something dropped {len(found.dropped)}, nothing droppable {len(found.nothing)} of {len(module_db)}; "
        f"samples not comparable {len(found.skipped)}"
    )
    assert not found.skipped, found.skipped
    assert len(found.dropped) >= 90
