"""A training step without its arithmetic: real models, real autograd, real recorder, and memory that nobody writes to.

Below the recorder, every op that makes memory is carried out on torch's `meta` device, where tensors have a size and no bytes,
and answered with tensors of that size on the CPU. Their pages are never touched, so that they take none. Views and autograd are
real. So a step of any size is recorded in seconds, with the ops, sizes and lifetimes of the computed step
(`tests/cpu/benchmarks/test_sizes.py` compares the two). What depends on values does not: Python reads 1 for every value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lightning_memopt.graph import Graph
from lightning_memopt.record.modes import Outside
from lightning_memopt.session.observe.observation import Observation

_VIEWS = {"aten::_unsafe_view", "aten::unsafe_chunk", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::lift_fresh"}
"""Ops whose results are views, though their schemas do not say so."""
_CPU = torch.device("cpu")


class Sizes(Outside):
    """A dispatch mode that answers ops by sizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name == "aten::_local_scalar_dense":
            return 1
        aliases = [r.alias_info for r in schema.returns]
        if any(a is not None and a.is_write for a in aliases):
            values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            out = tuple(values[name] for name in written)
            return out[0] if len(schema.returns) == 1 else out
        if any(a is not None for a in aliases) or schema.name in _VIEWS or not schema.name.startswith("aten::"):
            return func(*args, **kwargs)
        if not schema.returns:
            return None
        options = {name: value for name, value in kwargs.items() if name != "generator"}
        if "device" in options:
            options["device"] = torch.device("meta")
        return tree_map(_untouched, func(*tree_map(_on_meta, args), **tree_map(_on_meta, options)))


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _untouched(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CPU)


def record(
    build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    computed: bool = False,
) -> Graph:
    """The second training step of a model, updates included, as a graph.

    build: gives the model and a batch; `model(**batch).loss` is the training loss.
    computed: with all arithmetic, for comparison.
    """
    sizes = Sizes()
    model, batch = build()  # with arithmetic: what initialises weights may draw until a number is within a range
    update = optimizer(p for p in model.parameters() if p.requires_grad)
    if not computed:
        sizes.enter()
    try:
        _step(model, batch, update)
        observation = Observation(model, [update], _CPU, None, verify=False, meter=False)
        recording = observation.begin_round(batch)
        if not computed:
            sizes.leave()
            sizes.enter(beneath=True)
        with recording:
            loss = model(**batch).loss
        observation.forward_ended()
        loss.backward()
        del loss
        observation.update_begins()
        update.step()
        update.zero_grad()
        graph = observation.finish()
    finally:
        sizes.leave()
    assert graph is not None
    return graph


def _step(model: nn.Module, batch: dict[str, torch.Tensor], update: torch.optim.Optimizer) -> None:
    model(**batch).loss.backward()
    update.step()
    update.zero_grad()
