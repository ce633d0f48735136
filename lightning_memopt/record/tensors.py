"""Tensors below autograd: which can be recorded, aliases of them, and ops that run as they do outside a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_memopt.torch_private import DispatchKey, no_dispatch_modes, set_excluded_keys, storage_use_count

PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")
_STRIDED = torch.strided
_COUNTER = DispatchKey.ADInplaceOrView


def _own_count() -> int:
    """The use count of a storage to which only its Python object refers."""
    t = torch.empty(1)
    cdata = t.untyped_storage()._cdata
    return storage_use_count(cdata) - 1


OWN_COUNT = _own_count()
"""What the Python object of a storage adds to its use count. It differs between versions of torch."""


def is_plain(t: torch.Tensor) -> bool:
    """Whether `t` is an ordinary strided tensor with memory, which can be recorded. All other tensors are opaque (R4)."""
    return (
        type(t) in PLAIN
        and t.layout is _STRIDED
        and not (t.is_quantized or t.is_nested or t.is_meta)
        and not (t.is_inference() or t._is_zerotensor())  # the zero tensors of tangents have no bytes
    )


def has_plain_bytes(t: torch.Tensor) -> bool:
    """Whether all that `t` has is its storage: it is an ordinary tensor, or one of a class that changes methods alone, as
    quantized weights of bitsandbytes are.
    """
    kind = type(t)
    return is_plain(t) or (
        issubclass(kind, torch.nn.Parameter)
        and kind.__torch_dispatch__ is torch.nn.Parameter.__torch_dispatch__
        and is_plain(t.data.as_subclass(torch.Tensor))
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an op's result or argument: a tensor, or a list of tensors and None. No pytrees on the hot path."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return []


def detached(t: torch.Tensor) -> torch.Tensor:
    """An alias of `t` without autograd history. It shares the version counter of `t`. No dispatch mode sees this."""
    # a dispatch mode excludes this key, and without the key the alias would get its own counter
    with no_dispatch_modes(), set_excluded_keys(_COUNTER, False):
        return t.detach()


def is_foreign(t: torch.Tensor) -> bool:
    """Whether another library made the memory of `t`, and may write to it unseen: `torch.from_numpy`, DLPack, a file.

    Memory that processes share does not count: the workers of a DataLoader make such batches, and do not write to them again.
    """
    return not t.untyped_storage().resizable() and not t.is_shared()


def in_shared_memory(t: torch.Tensor) -> bool:
    """Whether other processes may have the memory of `t`. (Torch's `is_shared` is true for every tensor of a device.)"""
    return t.device == _CPU and t.is_shared()


def conjugating(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op to run as outside a dispatch mode, inside which its kernel would ignore conjugations (pytorch#198118)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with set_excluded_keys(DispatchKey.Conjugate, False), set_excluded_keys(DispatchKey.Negative, False):
            return func(*args, **kwargs)

    return run


def count_versions(targets: list[torch.Tensor], before: list[int]) -> None:
    """Increment the version counters of those `targets` whose counters have not moved since `before`, although they were
    overwritten: under a dispatch mode, torch does not count the writes of `_foreach_` ops.
    """
    torch.autograd.graph.increment_version([t for t, v in zip(targets, before, strict=True) if t._version == v])


def covers(t: torch.Tensor) -> bool:
    """Whether `t` covers all of its storage, in order."""
    return t.nbytes == t.untyped_storage().nbytes() and t.is_contiguous()


def fills(t: torch.Tensor) -> bool:
    """Whether `t` covers all of its storage, each element once, in any order of its dimensions."""
    return (
        t.nbytes == t.untyped_storage().nbytes() and not t.is_conj() and not t.is_neg() and (t.is_contiguous() or is_dense(t))
    )


def is_dense(t: torch.Tensor) -> bool:
    """Whether the elements of `t` follow each other in memory, each once, in any order of its dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of `t`, as flat uint8. Call below autograd."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
