"""The operators that torch would choose on a CUDA device, for a step that is recorded on the CPU.

Most operators are the same on both. These are not: the CPU has no fused attention with dropout, its dropout saves the noise
instead of a mask, and optimizers update one parameter after the other instead of all together (`foreach`). What is saved, and
so the memory of a step, differs by several times.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

from lightning_memopt.device.pretending import IS_CUDA
from lightning_memopt.fitting.card_types import host_type
from lightning_memopt.fitting.unfilled import Unfilled
from lightning_memopt.torch_private import (
    default_device,
    makers_on_default_device,
    no_dispatch_modes,
    parse_to,
)

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DROPOUTS = (torch.dropout, torch.nn.functional.dropout)
_CELLS = {torch.lstm_cell: "_thnn_fused_lstm_cell", torch.gru_cell: "_thnn_fused_gru_cell"}
"""Function -> CUDA's operator for all that follows the two products of a recurrent cell."""
_BATCH_NORMS = (torch.batch_norm, torch.nn.functional.batch_norm)

_HALF = (torch.bfloat16, torch.float16)
_OF_DEVICES = (torch.device, parse_to)
"""Functions that return a device: it is the one that was asked for, until a tensor is made on it or moved to it."""
_CARD = torch.device("cuda", 0)
_WHERE = {IS_CUDA: True, torch.Tensor.device.__get__: _CARD, torch.Tensor.get_device: 0}
"""Functions that say where a tensor is -> what they say of one on the card."""
_PLACES = (torch.Tensor.to, parse_to, torch.Tensor.cpu)
"""Functions whose first argument, after a tensor, may be a device or its number."""
_LIBRARIES = ("torch.", "lightning_memopt.")
"""Modules that are to find tensors where they are: they call the device's own functions."""
_READS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist)
"""Functions that give all values to user code. No dispatch mode sees them."""
_TORCH, _GROUPED = TorchVersion(torch.__version__), "2.14"
"""From this version on, memory-efficient attention takes grouped heads."""
_LARGEST_HEAD = 256
"""The largest head that flash attention has kernels for."""
_MOST_IMAGES, _MOST_IMAGES_IN_EVALUATION, _MOST_VALUES = 880_801, 65_535, 1 << 31
"""Maximum number of images, and of values, that torch gives to cuDNN's batch normalization."""
_ONE_BY_ONE = ("Adafactor", "Muon", "LBFGS", "SparseAdam")
"""Optimizers that update one parameter after the other on CUDA, too, unless they are asked for more."""


class Reads(TorchFunctionMode):
    """Within, tensors whose values user code reads all at once have values.

    mode: gives them.
    """

    def __init__(self, mode: Unfilled) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__wrapped__", func) in _READS:  # a recorder wraps them
            self._mode.answers(args[0])
        return func(*args, **(kwargs or {}))


class CudaOperators(Reads):
    """Within, attention and dropout are those of CUDA, too, and what is made on or moved to a CUDA device is on the CPU.

    mode: is told of these tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return self._moved(args[0])
        if func in _WHERE and self._mode.is_on_device(args[0]) and not _is_in_library(sys._getframe(1)):
            return _WHERE[func]
        if func is torch.Tensor.type and host_type(args[-1]) is not None:
            return self._moved(func(args[0], host_type(args[-1])))
        if func in _PLACES:
            args, kwargs = _by_device(args), {name: _numbered(value) for name, value in kwargs.items()}
            if self._leaves(func, args, kwargs):
                return _copied(args[0], self._mode)
            if (
                func is torch.Tensor.to
                and len(args) > 1
                and isinstance(args[1], torch.Tensor)
                and self._mode.is_on_device(args[1])
            ):
                return self._moved(func(*args, **kwargs))
        elif isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": _CARD}
        if func in (torch.isfinite, torch.Tensor.isfinite) and self._mode.is_unfilled(args[0]):
            return torch.ones(args[0].size(), dtype=torch.bool)
        if kwargs.get("device") is None and func in makers_on_default_device() and _is_cuda(default_device()):
            kwargs = {**kwargs, "device": default_device()}
        if func not in _OF_DEVICES and (any(map(_is_cuda, args)) or any(map(_is_cuda, kwargs.values()))):
            made = func(*map(_here, args), **{name: _here(value) for name, value in kwargs.items()})
            return self._moved(made)
        if func is _ATTENTION:
            return _attention(*args, **kwargs)
        if func in _DROPOUTS:
            dropped = _masked_dropout(*args, **kwargs)
            return func(*args, **kwargs) if dropped is None else dropped
        if func in _CELLS:
            return _cell(_CELLS[func], *args, **kwargs)
        if func in _BATCH_NORMS:
            return (_batch_norm if func is torch.batch_norm else _functional_batch_norm)(*args, **kwargs)
        if func is torch.nn.functional.multi_head_attention_forward:  # this mode is off in what it calls
            with mock.patch.multiple(torch.nn.functional, scaled_dot_product_attention=_attention, dropout=_dropout):
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _leaves(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether a tensor goes back to the host, and to no other type."""
        if func is parse_to or not isinstance(args[0], torch.Tensor) or args[0].requires_grad or len(args) > 2:
            return False
        if args[0].layout is not torch.strided:
            return False
        to = args[1] if len(args) > 1 else kwargs.get("device", "cpu" if func is torch.Tensor.cpu else None)
        same = kwargs.get("dtype") in (None, args[0].dtype)
        return same and isinstance(to, (str, torch.device)) and str(to).startswith("cpu") and self._mode.is_on_device(args[0])

    def _moved(self, made: Any) -> Any:
        """What was moved to the card. A part of a tensor on the host is copied, as it would be."""
        if (
            isinstance(made, torch.Tensor)
            and made.layout is torch.strided
            and made.nbytes < made.untyped_storage().nbytes()
            and not self._mode.is_on_device(made)
        ):
            made = made.clone()
        self._mode.moves(made)
        return made


def _is_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


def _is_in_library(frame: Any) -> bool:
    """Whether code of torch's, or this package's, runs."""
    name: str = frame.f_globals.get("__name__", "")
    return f"{name}.".startswith(_LIBRARIES)


def _numbered(value: Any) -> Any:
    """A device instead of its number."""
    return _CARD if isinstance(value, int) and not isinstance(value, bool) else value


def _by_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a device instead of its number where a device may stand."""
    at = 1 if args and isinstance(args[0], torch.Tensor) else 0
    return (*args[:at], *map(_numbered, args[at : at + 1]), *args[at + 1 :])


def _copied(t: torch.Tensor, mode: Unfilled) -> torch.Tensor:
    """A copy of a tensor on the host, in memory that is not torch's, so that it does not count. Where the values are not known,
    the memory is not touched.
    """
    with no_dispatch_modes():
        memory = mmap.mmap(-1, max(1, t.nbytes)) if t.numel() else None
        flat = torch.empty(0, dtype=t.dtype) if memory is None else torch.frombuffer(memory, dtype=t.dtype, count=t.numel())
        copy = flat.view(t.size())
        if mode.is_unfilled(t):
            return mode.empties(copy)
        return copy.copy_(t.detach())


def _here(value: Any) -> Any:
    """The CPU instead of a CUDA device."""
    return torch.device("cpu") if _is_cuda(value) else value


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention in half precision without a mask, and memory-efficient attention otherwise, as torch chooses."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    aten, head = torch.ops.aten, query.size(-1)
    flash = attn_mask is None and query.dtype in _HALF and head <= _LARGEST_HEAD
    grouped = enable_gqa and query.dim() == 4 and query.size(-3) != key.size(-3)
    if query.dim() != 4 or (grouped and not flash and _TORCH < _GROUPED):
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = head**-0.5 if scale is None else scale
    if flash:
        padded = [torch.nn.functional.pad(t, (0, -head % 8)) if head % 8 else t for t in (query, key, value)]
        made = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return made[..., :head] if head % 8 else made
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # torch turns it into numbers to add
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -float("inf"))
        attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    saves = query.requires_grad or key.requires_grad
    made = aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)
    attended: torch.Tensor = made[0]
    return attended


def _masked_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **named: Any) -> Any:
    """Dropout that saves a mask of one byte an element; None if CUDA has no such kernel for these arguments. `torch.dropout`
    calls `training` by another name: `train`.
    """
    drops = named.get("train", training) and not inplace and 0 < p < 1 and input.is_floating_point()
    return torch.native_dropout(input, p, True)[0] if drops else None


def _cell(
    name: str,
    input: torch.Tensor,
    hx: Any,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    """A cell of a recurrent net. `hx`: its state; with an LSTM's, the cell's, too (ATen's RNN.cpp)."""
    given = (input, *(hx if isinstance(hx, (tuple, list)) else (hx,)), w_ih, w_hh, b_ih, b_hh)
    if torch.is_autocast_enabled("cpu"):
        given = tuple(t if t is None else t.to(torch.get_autocast_dtype("cpu")) for t in given)
    input, hidden, *state, w_ih, w_hh, b_ih, b_hh = given
    products = torch.matmul(input, w_ih.t()), torch.matmul(hidden, w_hh.t())
    made = getattr(torch.ops.aten, name)(*products, *(state or [hidden]), b_ih, b_hh)
    return made[:2] if state else made[0]


def _batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Batch normalization by cuDNN where torch chooses it (`_select_batch_norm_backend` of ATen's Normalization.cpp): for
    images and the like, in single precision, or in float16 with weights in single precision.
    """
    given = (input, weight, bias, running_mean, running_var, training, momentum, eps)
    if (
        not cudnn_enabled
        or input.dim() < 3
        or weight is None
        or bias is None
        or (running_mean is None) != (running_var is None)
        or (running_mean is None and not training)
        or input.dtype not in (torch.float32, torch.float16)
        or weight.dtype != torch.float32
        or input.size(0) > (_MOST_IMAGES if training else _MOST_IMAGES_IN_EVALUATION)
        or input.numel() >= _MOST_VALUES
    ):
        return torch.batch_norm(*given, cudnn_enabled)
    made: torch.Tensor = torch.ops.aten.cudnn_batch_norm(*given)[0]
    return made


def _functional_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm`, as on CUDA."""
    if training and input.numel() == input.size(1):  # torch's own error
        return _BATCH_NORMS[1](input, running_mean, running_var, weight, bias, training, momentum, eps)
    enabled = torch.backends.cudnn.enabled
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, enabled)


def _dropout(*args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.dropout`, as on CUDA."""
    dropped = _masked_dropout(*args, **kwargs)
    return _DROPOUTS[1](*args, **kwargs) if dropped is None else dropped


def update_together(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make optimizers that were not told how update all parameters together, as they do on CUDA."""
    for optimizer in optimizers:
        if type(optimizer).__name__ in _ONE_BY_ONE:
            continue
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True


def count_on_host(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether the numbers of their steps are on the host, as they are unless the update is fused, or made for CUDA graphs."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return not any(group.get("fused") or group.get("capturable") for group in groups)
