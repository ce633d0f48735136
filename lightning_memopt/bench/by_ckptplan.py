"""`ckptplan` of PyPI: it profiles every block and selects, by dynamic programming, which blocks are checkpointed.

Its `apply_plan` makes a new module that calls each block with the result of the previous one, which real models are not. So the
blocks that its plan selects are checkpointed inside the model, by the torch function that it uses itself. It measures the bytes
of a block only on CUDA; on the CPU our meter measures how many bytes are added by the forward of the block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_memopt.bench.methods import Applied, blocks_of, checkpointed
from lightning_memopt.bench.subject import Subject
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.native import counter


class _Seen:
    """The first call of every block in a step: its inputs, and the bytes that it added."""

    def __init__(self, subject: Subject, blocks: list[nn.Module]) -> None:
        self.inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.nbytes: dict[int, int] = {}
        self._count = counter()
        with contextlib.ExitStack() as stack:
            for i, block in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(self._before(i), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._after(i)).remove)
            subject.step()

    def _live(self) -> int:
        return self._count.live_nbytes if self._count is not None else 0

    def _before(self, i: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs.setdefault(i, (_detached(args), {name: _detached(value) for name, value in kwargs.items()}))
            self.nbytes[i] = -self._live()

        return hook

    def _after(self, i: int) -> Any:
        def hook(*_: Any) -> None:
            self.nbytes[i] += self._live()

        return hook


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value


@contextlib.contextmanager
def by_ckptplan(subject: Subject, share: float) -> Iterator[Applied]:
    """Blocks that ckptplan selects for this share of the activations of all blocks."""
    try:
        import ckptplan
    except ImportError as error:
        raise UnsupportedError(f"{error}; pip install ckptplan") from None
    modules = blocks_of(subject)
    seen = _Seen(subject, modules)
    if idle := len(modules) - len(seen.inputs):
        raise UnsupportedError(f"{idle} of {len(modules)} blocks did not run in a step. Give blocks that run.")
    declared = ckptplan.declare_blocks(subject.model, [(f"block{i}", block) for i, block in enumerate(modules)])
    profiles, note = _profiles(subject, declared, seen)
    whole = sum(profile.activation_bytes_estimate for profile in profiles)
    try:
        plan = ckptplan.plan_checkpoints(
            profiles,
            declared,
            target_kind="activation_budget_bytes",
            target_value=int(share * whole),
            planner="dynamic_programming",
        )
    except Exception as error:  # its own classes: no plan fits, or a block must not be checkpointed
        excluded = {profile.exclusion_reason for profile in profiles} - {None}
        why = f" It leaves blocks out: {', '.join(sorted(excluded))}." if excluded else ""
        raise UnsupportedError(f"ckptplan refuses a budget of {100 * share:g} %: {error}.{why} Give it a larger one.") from None
    selected = [block for block, decision in zip(modules, plan.decisions, strict=True) if decision.checkpointed]
    if not selected:
        raise UnsupportedError("ckptplan selects no block for this budget. Give it a smaller one.")
    yield Applied(lambda: checkpointed(selected), note=f"{len(selected)} of {len(modules)} blocks selected{note}")


def _profiles(subject: Subject, declared: Any, seen: _Seen) -> tuple[list[Any], str]:
    """ckptplan's measurements of each single block, and a note on what it did not measure."""
    import ckptplan

    profiles = []
    for i, block in enumerate(declared):
        args, kwargs = seen.inputs[i]
        alone = dataclasses.replace(block, order=0)
        profile = ckptplan.profile_blocks([alone], args, kwargs, device=str(subject.device), num_warmup=1, num_trials=2)[0]
        profiles.append(dataclasses.replace(profile, order=i))
    if all(profile.activation_bytes_estimate is not None for profile in profiles):
        return profiles, ""
    measured = [
        dataclasses.replace(
            profile,
            timing_only=False,
            activation_bytes_estimate=max(0, seen.nbytes[i]),
            activation_bytes_method="isolated_forward_delta",
        )
        for i, profile in enumerate(profiles)
    ]
    return measured, "; bytes of blocks by our meter, because its profiler measures them only on CUDA"
