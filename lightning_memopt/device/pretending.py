"""A process that has no CUDA device, and in which a training script finds one."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_CAPABILITY = (9, 0)
"""What the device can do: everything that scripts ask for before they train in bfloat16."""

IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
"""What a function mode sees of `t.is_cuda`."""


@contextlib.contextmanager
def cuda_is_here(name: str, nbytes: int) -> Iterator[None]:
    """Within, `torch.cuda` and `torch.accelerator` speak of one device with this name and so many bytes, and pinned memory is
    ordinary memory. Nothing can be computed on the device.
    """
    cuda = _answers(name, nbytes)
    accelerator = cuda | {
        "current_accelerator": _always(torch.device("cuda")),
        "current_device_index": _always(0),
        "set_device_index": _always(None),
    }
    with contextlib.ExitStack() as stack:
        for module, answers in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
            for asked, answer in answers.items():
                if hasattr(module, asked):
                    stack.enter_context(mock.patch.object(module, asked, answer))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda t, *device: t))  # in loaders' threads, too
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch.nn.DataParallel, "forward", _on_one))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda t, stream: None))
        yield


def _answers(name: str, nbytes: int) -> dict[str, Any]:
    """Function of `torch.cuda` -> what it is replaced by."""
    properties = SimpleNamespace(
        name=name, total_memory=nbytes, major=_CAPABILITY[0], minor=_CAPABILITY[1], multi_processor_count=100, warp_size=32
    )
    constants = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": _CAPABILITY,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "mem_get_info": (nbytes, nbytes),
        "is_current_stream_capturing": False,
        "memory_summary": "",
        "memory_stats": collections.defaultdict(int),
        "get_arch_list": [],
    }
    zeros = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization")
    nothing = (
        "init set_device synchronize empty_cache ipc_collect reset_peak_memory_stats reset_max_memory_allocated manual_seed "
        "manual_seed_all seed seed_all set_per_process_memory_fraction set_rng_state set_rng_state_all"
    )
    values = constants | dict.fromkeys(zeros, 0) | dict.fromkeys(nothing.split())
    answers: dict[str, Any] = {asked: _always(value) for asked, value in values.items()}
    answers |= {
        "current_stream": _always(_Stream()),
        "default_stream": _always(_Stream()),
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
    }
    answers |= {"Stream": _Stream, "Event": _Stream}
    return answers | {"get_rng_state": _no_random_state, "get_rng_state_all": lambda: [_no_random_state()]}


_GENERATOR: Any = torch.Generator


class _AnyGenerator(type):
    def __call__(cls, device: Any = None) -> Any:
        return _GENERATOR("cpu")

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_AnyGenerator):
    """`torch.Generator` of any device: it draws on the CPU."""


class _Stream:
    """A stream, or an event, that never has anything to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 1.0  # milliseconds; scripts divide by it

    def _does_nothing(self, *args: Any) -> None: ...

    synchronize = wait_stream = wait_event = record = record_event = wait = _does_nothing


def _on_one(parallel: Any, *inputs: Any, **kwargs: Any) -> Any:
    """`DataParallel.forward` with one device, without its check that all parameters are there."""
    return parallel.module(*inputs, **kwargs)


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _no_random_state(device: Any = None) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)
